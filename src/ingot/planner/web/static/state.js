// The settings of the page and its link. Values are texts, which only the server interprets.

const PINNED = "a";

export class Settings {
  /** words: setting -> text, for settings that are not left to the rules. pinned: the link of plan A, or "". */
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

  /** Return the settings with changed texts; an empty text leaves its setting to the rules. */
  with(changes) {
    const words = { ...this.words, ...changes };
    for (const key of Object.keys(words)) if (words[key] === "") delete words[key];
    return new Settings(words, this.pinned);
  }

  /** Return the address of the page with the present settings. */
  get address() {
    const query = new URLSearchParams(this.words);
    if (this.pinned) query.set(PINNED, this.pinned);
    return `${location.pathname}?${query}`;
  }
}
