// Requests to the server. All are GET; the cookie of the page is sent with them.

/** An error of the server: found, rule and fix. */
export class Refused extends Error {
  constructor({ found, rule, fix }) {
    super(found);
    Object.assign(this, { found, rule, fix });
  }
}

/** Return why the server refuses the events at `path`, as Refused; null if it does not. */
export async function refusalOf(path) {
  const end = new AbortController();
  try {
    const response = await fetch(path, { signal: end.signal });
    return response.ok ? null : new Refused(await response.json());
  } catch {
    return null; // it does not answer at all: the caller tries again
  } finally {
    end.abort();
  }
}

/** Return the JSON at `path`. Throws Refused. */
export async function ask(path) {
  let response, answer;
  try {
    response = await fetch(path);
    answer = await response.json();
  } catch {
    throw new Refused({ found: "the page's server does not answer", rule: "", fix: "is `ingot watch --web` still running?" });
  }
  if (!response.ok) throw new Refused(answer);
  return answer;
}
