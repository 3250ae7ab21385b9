// Requests to the planner. A new request of one kind discards the answer to the previous request of this kind.

/** An error of the server: found, rule and fix. */
export class Refused extends Error {
  constructor({ found, rule, fix }) {
    super(found);
    Object.assign(this, { found, rule, fix });
  }
}

export class Line {
  #controller = null;

  /** Return the JSON at `path`, undefined if a newer request was sent. Throws Refused. */
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
