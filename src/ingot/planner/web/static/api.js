// Questions to the planner. Each kind has one line: a new question drops the answer of the one before.

/** What the server refused: found, rule and fix. */
export class Refused extends Error {
  constructor({ found, rule, fix }) {
    super(found);
    Object.assign(this, { found, rule, fix });
  }
}

export class Line {
  #controller = null;

  /** The JSON at `path`, or undefined when a newer question was asked. Throws Refused. */
  async ask(path) {
    this.drop();
    const controller = (this.#controller = new AbortController());
    try {
      const response = await fetch(path, { signal: controller.signal });
      const answer = await response.json();
      if (controller.signal.aborted) return undefined;
      if (!response.ok) throw new Refused(answer);
      return answer;
    } catch (error) {
      if (controller.signal.aborted) return undefined;
      if (error instanceof Refused) throw error;
      throw new Refused({ found: "the planner does not answer", rule: "", fix: "is `ingot plan --web` still running?" });
    }
  }

  drop() {
    this.#controller?.abort();
  }
}
