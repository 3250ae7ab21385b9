// The settings of the page and its link. Values are words; what they mean is the server's business.

const PINNED = "a";

export class Settings {
  /** words: setting -> text, those that are not left open. pinned: the link of plan A, "" without one. */
  constructor(words = {}, pinned = "") {
    this.words = words;
    this.pinned = pinned;
  }

  static fromLocation() {
    const query = new URLSearchParams(location.search);
    const pinned = query.get(PINNED) ?? "";
    query.delete(PINNED);
    return new Settings(Object.fromEntries(query), pinned);
  }

  get query() {
    return new URLSearchParams(this.words).toString();
  }

  /** With other words; an empty one leaves its setting open. */
  with(changes) {
    const words = { ...this.words, ...changes };
    for (const key of Object.keys(words)) if (words[key] === "") delete words[key];
    return new Settings(words, this.pinned);
  }

  /** The address of the page as it is now, for the address bar and for others. */
  get address() {
    const query = new URLSearchParams(this.words);
    if (this.pinned) query.set(PINNED, this.pinned);
    return `${location.pathname}?${query}`;
  }
}
