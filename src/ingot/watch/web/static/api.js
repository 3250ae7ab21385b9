// Requests to the server. All are GET; the cookie of the page is sent with them.

/** An error of the server: found, rule and fix. */
export class Refused extends Error {
  constructor({ found, rule, fix }) {
    super(found);
    Object.assign(this, { found, rule, fix });
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
