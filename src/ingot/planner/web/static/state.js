// The settings of the page, and their link. Values are texts, which only the server interprets.

const PINNED = "a";

export class Settings {
  /** words: the text of each setting that the rules do not choose. pinned: the link of plan A, or "". */
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

  /** Return the settings with changed texts. If a text is empty, the rules choose this setting. */
  with(changes) {
    const words = { ...this.words, ...changes };
    for (const key of Object.keys(words)) if (words[key] === "") delete words[key];
    return new Settings(words, this.pinned);
  }

  /** Return the address of the page with the current settings. */
  get address() {
    const query = new URLSearchParams(this.words);
    if (this.pinned) query.set(PINNED, this.pinned);
    return `${location.pathname}?${query}`;
  }
}
