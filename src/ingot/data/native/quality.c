/* Words and the counts of the quality rules, over the UTF-8 of a text.
 *
 * Each function gives the same result as its Python reference: words() and sentences() as in
 * ingot.data.filters.words.english, gopher(), c4() and fineweb() as in ingot.data.filters.counts. The character classes
 * come from Python too: setup() takes a function that returns the classes of a page of 256 characters; it is called once
 * for each page that occurs in a text.
 *
 * Every scan and every table is linear in the text. Hashes only choose slots, whose entries are compared byte by byte,
 * and are salted per process: no text can collide on purpose, and no collision changes a result. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

typedef uint8_t byte;

/* The bits of ingot.data.filters.words.tables. */
enum {
    SPACE = 1 << 0, BREAK = 1 << 1, ALPHABETIC = 1 << 2, ALPHANUMERIC = 1 << 3, DECIMAL = 1 << 4,
    PUNCTUATION = 1 << 5, TERMINAL = 1 << 6, PREFIX = 1 << 7, SUFFIX = 1 << 8, BEFORE_STOP = 1 << 9,
    LETTER = 1 << 10, LOWER = 1 << 11, UPPER = 1 << 12, QUOTE = 1 << 13, ICON = 1 << 14,
    CATEGORY_P = 1 << 15, SENTENCE = 1 << 16, BULLET = 1 << 17,
    /* Of bytes only: */
    NOT_ASCII = 1 << 24, HASH = 1 << 25, STOP = 1 << 26
};
enum { ELLIPSIS = 0x2026 };

/* ---- characters ---- */

static PyObject *page_source;
static uint32_t *pages[0x1100];
static uint32_t byte_flags[256];
static int page_failed; /* an error is set; each caller checks for errors before it returns a result */
static uint64_t salt;

static const uint32_t *load_page(uint32_t number) {
    static const uint32_t nothing[256];
    if (page_failed) return nothing; /* Python must not be called with an error set */
    PyObject *bytes = PyObject_CallFunction(page_source, "I", number);
    char *data;
    Py_ssize_t size;
    if (bytes == NULL || PyBytes_AsStringAndSize(bytes, &data, &size) < 0 || size != 256 * sizeof(uint32_t)) {
        Py_XDECREF(bytes);
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a page has 256 classes");
        page_failed = 1;
        return nothing;
    }
    uint32_t *page = PyMem_Malloc(sizeof(nothing));
    if (page == NULL) {
        Py_DECREF(bytes);
        PyErr_NoMemory();
        page_failed = 1;
        return nothing;
    }
    memcpy(page, data, sizeof(nothing));
    Py_DECREF(bytes);
    return pages[number] = page;
}

static inline uint32_t flags_of(uint32_t c) {
    const uint32_t *page = pages[c >> 8];
    return (page != NULL ? page : load_page(c >> 8))[c & 255];
}

/* Returns the character at p, and moves p after it. The text is valid UTF-8, because Python encoded it. */
static inline uint32_t next_character(const byte **at) {
    const byte *p = *at;
    uint32_t c = p[0];
    if (c < 0x80) { *at = p + 1; return c; }
    if (c < 0xE0) { *at = p + 2; return (c & 31) << 6 | (p[1] & 63); }
    if (c < 0xF0) { *at = p + 3; return (c & 15) << 12 | (p[1] & 63) << 6 | (p[2] & 63); }
    *at = p + 4;
    return (c & 7) << 18 | (uint32_t)(p[1] & 63) << 12 | (p[2] & 63) << 6 | (p[3] & 63);
}

/* Returns the character before p, and moves p to its start. */
static inline uint32_t previous_character(const byte **at) {
    const byte *p = *at - 1;
    while ((*p & 0xC0) == 0x80) p--;
    *at = p;
    return next_character(&p);
}

static size_t count_characters(const byte *p, size_t size) {
    size_t count = 0;
    for (size_t i = 0; i < size; i++) count += (p[i] & 0xC0) != 0x80;
    return count;
}

static void strip(const byte **start, const byte **end) {
    const byte *p;
    while (*start < *end && (p = *start, flags_of(next_character(&p)) & SPACE)) *start = p;
    while (*start < *end && (p = *end, flags_of(previous_character(&p)) & SPACE)) *end = p;
}

/* ---- hashing ---- */

static inline uint64_t mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * (salt | 1);
    return h ^ h >> 29;
}

/* Returns up to eight bytes at p as a number, without reading at `limit` or after it. */
static inline uint64_t load(const byte *p, size_t size, const byte *limit) {
    uint64_t x = 0;
    if (size >= 8) {
        memcpy(&x, p, 8);
    } else if (limit - p >= 8) {
        memcpy(&x, p, 8);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        x &= ~(~(uint64_t)0 >> 8 * size);
#else
        x &= ((uint64_t)1 << 8 * size) - 1;
#endif
    } else {
        memcpy(&x, p, size);
    }
    return x;
}

static inline uint64_t hash_bytes(const byte *p, size_t size, const byte *limit) {
    uint64_t h = mix(salt, size);
    for (; size >= 8; p += 8, size -= 8) h = mix(h, load(p, 8, limit));
    if (size) h = mix(h, load(p, size, limit));
    return h ^ h >> 32;
}

/* A hash table of entry numbers with open addressing. `size` is a power of two, at least twice the number of entries. */
typedef struct {
    uint32_t *slots; /* 0: free; else entry number + 1 */
    size_t size;
} Table;

static int table_make(Table *table, size_t entries) {
    table->size = 16;
    while (table->size < 2 * entries) table->size *= 2;
    table->slots = PyMem_Calloc(table->size, sizeof(uint32_t));
    return table->slots != NULL ? 0 : -1;
}

/* An array that grows. */
typedef struct {
    void *items;
    size_t capacity;
} Array;

static int array_reserve(Array *array, size_t count, size_t item_size) {
    if (count <= array->capacity) return 0;
    size_t capacity = array->capacity ? array->capacity : 64;
    while (capacity < count) capacity *= 2;
    void *items = PyMem_Realloc(array->items, capacity * item_size);
    if (items == NULL) return -1;
    array->items = items;
    array->capacity = capacity;
    return 0;
}

/* ---- special cases ---- */

enum { MOST_PARTS = 4, MOST_JOINED = 12, MOST_STOP_WORDS = 16 };

typedef struct {
    byte *bytes;
    uint32_t size;
    byte parts, joined;     /* number of words it becomes; number of words that are joined to it, 0 if never */
    byte ends[MOST_PARTS];  /* ends of the words it becomes, in characters */
    byte cuts[MOST_JOINED]; /* ends of the words that are joined to it */
} Special;

static Special *specials;
static Table special_table;
static uint64_t special_sizes[256], joined_sizes[256]; /* by first byte: bit n is set if a case has n bytes */
static size_t longest_special;                          /* in characters */
static char *units[256];
static size_t unit_sizes[256]; /* in bytes */
static size_t num_units, longest_unit; /* longest in characters */
static char *stop_words[MOST_STOP_WORDS];
static size_t num_stop_words;

static inline int may_be_special(const byte *p, size_t size) {
    return size > 0 && size < 64 && special_sizes[*p] >> size & 1;
}

static const Special *find_special(const byte *p, size_t size, uint64_t hash) {
    size_t slot = hash & (special_table.size - 1);
    for (uint32_t entry; (entry = special_table.slots[slot]) != 0; slot = (slot + 1) & (special_table.size - 1)) {
        const Special *special = &specials[entry - 1];
        if (special->size == size && memcmp(special->bytes, p, size) == 0) return special;
    }
    return NULL;
}

/* ---- words by the rules of spaCy: see english.py, function by function ---- */

typedef struct {
    const byte *text, *limit;
    uint32_t *chars, *flags, *offsets; /* per character of the chunk; offsets has one entry more */
    uint32_t *ends;                    /* ends of its words, in characters, ascending */
    uint32_t *spare, *cases;           /* scratch memory */
    byte *taken;
    size_t num_ends;
    Array memory;
} Chunk;

static const Special *special_at(const Chunk *c, size_t start, size_t end) {
    if (start >= end || end - start > longest_special) return NULL;
    const byte *p = c->text + c->offsets[start];
    size_t size = c->offsets[end] - c->offsets[start];
    return may_be_special(p, size) ? find_special(p, size, hash_bytes(p, size, c->limit)) : NULL;
}

static inline int is_digit(uint32_t c) { return c - '0' < 10; }

static size_t stops_at(const Chunk *c, size_t start, size_t end) {
    size_t i = start;
    while (i < end && c->chars[i] == '.') i++;
    return i - start;
}

static size_t prefix_length(const Chunk *c, size_t start, size_t end) {
    if (start >= end) return 0;
    const uint32_t *p = c->chars + start;
    size_t left = end - start;
    if (c->flags[start] & PREFIX) return 1;
    if (*p == '+') return left == 1 || !is_digit(p[1]);
    if (*p == '.') {
        size_t run = stops_at(c, start, end);
        return run > 1 ? run : 0;
    }
    if (left >= 3 && p[0] == 'U' && p[1] == 'S' && p[2] == '$') return 3;
    if (left >= 2 && (p[0] == 'C' || p[0] == 'A') && p[1] == '$') return 2;
    return 0;
}

static int is_unit(const Chunk *c, size_t start, size_t end) {
    size_t size = c->offsets[end] - c->offsets[start];
    const byte *p = c->text + c->offsets[start];
    for (size_t i = 0; i < num_units; i++)
        if (unit_sizes[i] == size && memcmp(units[i], p, size) == 0) return 1;
    return 0;
}

static size_t suffix_length(const Chunk *c, size_t start, size_t end) {
    if (start >= end) return 0;
    const uint32_t *p = c->chars;
    uint32_t last = p[end - 1], before = end - start > 1 ? p[end - 2] : 0;
    size_t lowest = is_digit(last) ? end : end - start > longest_unit + 1 ? end - longest_unit - 1 : start;
    for (size_t i = end - 1; i > lowest;) {
        i--;
        if (is_digit(p[i])) {
            if (is_unit(c, i + 1, end)) return end - 1 - i;
            break;
        }
    }
    if (last == '.') {
        size_t first = end - 1;
        while (first > start && p[first - 1] == '.') first--;
        if (end - first > 1) return end - first;
        if (first == start) return 0;
        uint32_t flags = c->flags[first - 1];
        if (flags & BEFORE_STOP) return 1;
        if (first < start + 2) return 0;
        if (flags & UPPER && c->flags[first - 2] & UPPER) return 1;
        return p[first - 2] == 0xB0 && before < 0x80 && before && strchr("FfCcKk", (int)before) != NULL;
    }
    if ((last | 32) == 's' && (before == '\'' || before == 0x2019)) return 2;
    if (last == ELLIPSIS && before == ELLIPSIS) return 2;
    if (c->flags[end - 1] & SUFFIX) return 1;
    return last == '+' && is_digit(before);
}

static size_t infix_length(const Chunk *c, size_t i, size_t start, size_t end) {
    const uint32_t *p = c->chars;
    uint32_t sign = p[i];
    if (sign == '.' && i + 1 < end && p[i + 1] == '.') return stops_at(c, i, end);
    if (sign == ELLIPSIS || c->flags[i] & ICON) return 1;
    if (i == start || i + 1 == end) return 0;
    uint32_t before = c->flags[i - 1], after = c->flags[i + 1];
    int digit = is_digit(p[i - 1]);
    switch (sign) {
    case '.': return before & (LOWER | QUOTE) && after & (UPPER | QUOTE);
    case ',': return before & LETTER && after & LETTER;
    case ':': case '<': case '>': case '=': case '/': return (before & LETTER || digit) && after & LETTER;
    case '+': case '*': case '^': return digit && (is_digit(p[i + 1]) || p[i + 1] == '-');
    case '-': if (digit && (is_digit(p[i + 1]) || p[i + 1] == '-')) return 1; break;
    case 0x2013: case 0x2014: case '~': break;
    default: return 0;
    }
    if (!(before & LETTER || digit)) return 0;
    size_t most = sign == '-' ? 3 : sign == 0x2014 ? 2 : 1, run = 1;
    while (run < most && i + run < end && p[i + run] == sign) run++;
    return i + run < end && c->flags[i + run] & LETTER ? run : 0;
}

static int in_label(uint32_t c) {
    return (c < 0x80 && byte_flags[c] & ALPHANUMERIC) || (c >= 0xA1 && c <= 0xFFFF);
}

static size_t host_end(const Chunk *c, size_t start, size_t end) {
    const uint32_t *p = c->chars;
    size_t i = start, label, labels = 0;
    for (;; i++, labels++) {
        label = i;
        while (i < end && (in_label(p[i]) || p[i] == '_' || p[i] == '-')) i++;
        if (i == end || p[i] != '.') break;
        if (i == label || i - label > 64 || !in_label(p[label]) || !in_label(p[i - 1])) return 0;
    }
    for (i = label; i < end && c->flags[i] & LOWER;) i++;
    return labels && i - label >= 2 && i - label <= 63 ? i : 0;
}

static size_t ip_end(const Chunk *c, size_t start, size_t end) {
    const uint32_t *p = c->chars;
    size_t i = start;
    uint32_t values[4];
    for (int octet = 0; octet < 4; octet++) {
        size_t first = i;
        uint32_t value = 0;
        while (i < end && i - first < 4 && is_digit(p[i])) value = value * 10 + p[i++] - '0';
        if (i == first || i - first > 3) return 0;
        if (p[first] == '0' && (octet == 0 || octet == 3 || i - first == 3)) return 0;
        if (octet < 3 && (i == end || p[i++] != '.')) return 0;
        values[octet] = value;
    }
    if (values[0] > 223 || values[1] > 255 || values[2] > 255 || values[3] > 254) return 0;
    if (values[0] == 10 || values[0] == 127 || (values[0] == 169 && values[1] == 254)) return 0;
    if ((values[0] == 192 && values[1] == 168) || (values[0] == 172 && values[1] >= 16 && values[1] <= 31)) return 0;
    return i;
}

static int is_tail(const Chunk *c, size_t i, size_t end) {
    const uint32_t *p = c->chars;
    if (i < end && p[i] == ':') {
        size_t port = ++i;
        while (i < end && c->flags[i] & DECIMAL) i++;
        if (i - port < 2 || i - port > 5) return 0;
    }
    return i == end || p[i] == '/' || p[i] == '?' || p[i] == '#';
}

static int is_host(const Chunk *c, size_t start, size_t end) {
    size_t ip = ip_end(c, start, end), host = host_end(c, start, end);
    return (ip && is_tail(c, ip, end)) || (host && is_tail(c, host, end));
}

static int is_address(const Chunk *c, size_t start, size_t end) {
    const uint32_t *p = c->chars;
    size_t i = start;
    int stop = 0;
    for (i = start; i < end && !stop; i++) stop = p[i] == '.';
    if (!stop) return 0;
    if (is_host(c, start, end)) return 1;
    for (i = start; i < end; i++)
        if (!(c->flags[i] & ALPHANUMERIC || p[i] == '_' || p[i] == '+' || p[i] == '-' || p[i] == '.')) break;
    if (i - start >= 2 && i + 3 <= end && p[i] == ':' && p[i + 1] == '/' && p[i + 2] == '/' && is_host(c, i + 3, end))
        return 1;
    for (i = start + 1; i < end; i++)
        if (p[i] == '@' && is_host(c, i + 1, end)) return 1;
    return 0;
}

/* Replaces adjacent words that form a special case by the words of that case: longest first, then leftmost. */
static void join(Chunk *c) {
    size_t found = 0, count = c->num_ends, start = 0;
    if (count < 2) return;
    for (size_t i = 0; i < count; start = c->ends[i++]) {
        const byte *p = c->text + c->offsets[start];
        c->cases[i] = 0; /* bit n is set if the n words from here form a case */
        if (!joined_sizes[*p]) continue;
        for (size_t words = 1; words <= MOST_JOINED && i + words <= count; words++) {
            size_t end = c->ends[i + words - 1], size = c->offsets[end] - c->offsets[start];
            if (end - start > longest_special || size > 63) break;
            if (!(joined_sizes[*p] >> size & 1)) continue;
            const Special *special = find_special(p, size, hash_bytes(p, size, c->limit));
            if (special == NULL || special->joined != words) continue;
            size_t same = 0;
            while (same < words && special->cuts[same] == c->ends[i + same] - start) same++;
            if (same == words) {
                c->cases[i] |= (uint32_t)1 << words;
                found++;
            }
        }
    }
    if (!found) return;
    byte *taken = c->taken, *chosen = c->taken + count;
    memset(taken, 0, 2 * count);
    for (size_t words = MOST_JOINED; words > 0; words--)
        for (size_t i = 0; i + words <= count; i++) {
            if (!(c->cases[i] >> words & 1)) continue;
            if (!taken[i] && !taken[i + words - 1]) chosen[i] = (byte)words;
            memset(taken + i, 1, words); /* even if the case was not chosen, as in spaCy */
        }
    size_t made = 0;
    start = 0;
    for (size_t i = 0; i < count;) {
        size_t words = chosen[i] ? chosen[i] : 1, end = c->ends[i + words - 1];
        if (chosen[i]) {
            const Special *special = special_at(c, start, end);
            for (int part = 0; part < special->parts; part++) c->spare[made++] = (uint32_t)start + special->ends[part];
        } else {
            c->spare[made++] = (uint32_t)end;
        }
        start = end;
        i += words;
    }
    memcpy(c->ends, c->spare, made * sizeof(uint32_t));
    c->num_ends = made;
}

/* Decodes the chunk text[from:to] and splits it: c->ends. Returns -1 if memory is short. */
static int split_chunk(Chunk *c, size_t from, size_t to) {
    size_t n = 0, most = to - from + 1;
    if (array_reserve(&c->memory, most, 6 * sizeof(uint32_t) + 2) < 0) return -1;
    c->chars = c->memory.items;
    c->flags = c->chars + most;
    c->offsets = c->flags + most;
    c->ends = c->offsets + most;
    c->spare = c->ends + most;
    c->cases = c->spare + most;
    c->taken = (byte *)(c->cases + most);
    for (const byte *p = c->text + from; p < c->text + to; n++) {
        c->offsets[n] = (uint32_t)(p - c->text);
        c->chars[n] = next_character(&p);
        c->flags[n] = flags_of(c->chars[n]);
    }
    c->offsets[n] = (uint32_t)to;
    size_t start = 0, end = n, made = 0, cut = 0;
    const Special *special = NULL;
    uint32_t *suffixes = c->spare; /* the start of each suffix, outermost first */
    while (start < end && (special = special_at(c, start, end)) == NULL) {
        size_t prefix = prefix_length(c, start, end);
        if (prefix && (special = special_at(c, start + prefix, end)) != NULL) {
            c->ends[made++] = (uint32_t)(start += prefix);
            break;
        }
        size_t suffix = suffix_length(c, start + prefix, end);
        if (suffix && (special = special_at(c, start, end - suffix)) != NULL) {
            suffixes[cut++] = (uint32_t)(end -= suffix);
            break;
        }
        if (!prefix && !suffix) break;
        if (prefix) c->ends[made++] = (uint32_t)(start += prefix);
        if (suffix) suffixes[cut++] = (uint32_t)(end -= suffix);
    }
    if (special != NULL) {
        for (int part = 0; part < special->parts; part++) c->ends[made++] = (uint32_t)start + special->ends[part];
    } else if (start < end) {
        if (!is_address(c, start, end)) {
            size_t word = start;
            for (size_t i = start; i < end;) {
                size_t infix = infix_length(c, i, start, end);
                if (infix && i > start) { /* an infix at the start cuts nothing */
                    if (i > word) c->ends[made++] = (uint32_t)i;
                    c->ends[made++] = (uint32_t)(word = i + infix);
                }
                i += infix ? infix : 1;
            }
            if (word < end) c->ends[made++] = (uint32_t)end;
        } else {
            c->ends[made++] = (uint32_t)end;
        }
    }
    while (cut) { /* a suffix ends where the next outer suffix begins */
        cut--;
        c->ends[made++] = cut ? suffixes[cut - 1] : (uint32_t)n;
    }
    c->num_ends = made;
    join(c);
    return 0;
}

/* Checks whether the chunk is one word without further splitting: ASCII letters only, and not a special case. */
static inline int is_plain(uint32_t any, uint32_t all, const byte *p, size_t size, uint64_t hash) {
    if (any & NOT_ASCII || !(all & LETTER)) return 0;
    return !may_be_special(p, size) || find_special(p, size, hash) == NULL;
}

/* Returns the end of the chunk at p, which is not whitespace. *any, *all: classes of any and of all its characters. */
static inline const byte *chunk_end(const byte *p, const byte *end, uint32_t *any, uint32_t *all, size_t *chars) {
    uint32_t or = 0, and = ~(uint32_t)0;
    size_t count = 0;
    while (p < end) {
        uint32_t flags = byte_flags[*p];
        const byte *next = p + 1;
        if (flags & (SPACE | NOT_ASCII)) {
            if (flags & SPACE) break;
            next = p;
            flags = flags_of(next_character(&next)) | NOT_ASCII;
            if (flags & SPACE) break;
        }
        or |= flags;
        and &= flags;
        count++;
        p = next;
    }
    *any = or;
    *all = and;
    *chars = count;
    return p;
}

static const byte *utf8(PyObject *text, size_t *size) {
    Py_ssize_t length;
    const char *data = PyUnicode_AsUTF8AndSize(text, &length);
    *size = 0;
    page_failed = 0;
    if (data == NULL) return NULL;
    if ((uint64_t)length >= (uint64_t)1 << 30) {
        PyErr_SetString(PyExc_OverflowError, "the text has a gigabyte or more");
        return NULL;
    }
    *size = (size_t)length;
    return (const byte *)data;
}

static int append(PyObject *list, const byte *p, size_t size) {
    PyObject *word = PyUnicode_FromStringAndSize((const char *)p, (Py_ssize_t)size);
    int failed = word == NULL || PyList_Append(list, word) < 0;
    Py_XDECREF(word);
    return failed ? -1 : 0;
}

static PyObject *words(PyObject *self, PyObject *text) {
    size_t size;
    const byte *start = utf8(text, &size), *end = start + size;
    (void)self;
    if (start == NULL) return NULL;
    PyObject *list = PyList_New(0);
    Chunk c = {.text = start, .limit = end};
    for (const byte *p = start; list != NULL && p < end && !page_failed;) {
        uint32_t any, all;
        size_t chars;
        const byte *next = chunk_end(p, end, &any, &all, &chars);
        if (next == p) {
            next_character(&p);
            continue;
        }
        int failed = 0;
        if (is_plain(any, all, p, next - p, hash_bytes(p, next - p, end))) {
            failed = append(list, p, next - p);
        } else if ((failed = split_chunk(&c, p - start, next - start)) < 0) {
            PyErr_NoMemory();
        } else {
            for (size_t i = 0, from = 0; i < c.num_ends && !failed; from = c.ends[i++])
                failed = append(list, start + c.offsets[from], c.offsets[c.ends[i]] - c.offsets[from]);
        }
        if (failed < 0) Py_CLEAR(list);
        p = next;
    }
    PyMem_Free(c.memory.items);
    if (PyErr_Occurred()) Py_CLEAR(list);
    return list;
}

/* Returns the number of sentences, at least one: see english.sentences. */
static PyObject *sentences(PyObject *self, PyObject *text) {
    size_t size, count = 1;
    const byte *start = utf8(text, &size), *end = start + size;
    (void)self;
    if (start == NULL) return NULL;
    Chunk c = {.text = start, .limit = end};
    int after_mark = 0;
    for (const byte *p = start; p < end && !page_failed;) {
        uint32_t any, all;
        size_t chars;
        const byte *next = chunk_end(p, end, &any, &all, &chars);
        if (next == p) { /* whitespace; a single space after a word does not count as a word */
            const byte *from = p;
            while (next < end && (p = next, flags_of(next_character(&p)) & SPACE)) next = p;
            if (after_mark && next - from > (from > start && *from == ' ')) {
                count++;
                after_mark = 0;
            }
            p = next;
            continue;
        }
        p = next;
        if (!(any & (NOT_ASCII | CATEGORY_P)) && all & ALPHANUMERIC) { /* contains no mark, so its words do not matter */
            count += after_mark;
            after_mark = 0;
            continue;
        }
        size_t from = 0;
        const byte *chunk = next;
        while (chunk > start && chars--) previous_character(&chunk);
        if (split_chunk(&c, chunk - start, next - start) < 0) {
            PyErr_NoMemory();
            break;
        }
        for (size_t i = 0; i < c.num_ends; from = c.ends[i++]) {
            int mark = c.ends[i] - from == 1 && c.flags[from] & SENTENCE, punctuation = 1;
            for (size_t k = from; k < c.ends[i]; k++) punctuation &= (c.flags[k] & CATEGORY_P) != 0;
            if (mark) {
                after_mark = 1;
            } else if (!punctuation) {
                count += after_mark;
                after_mark = 0;
            }
        }
    }
    PyMem_Free(c.memory.items);
    return PyErr_Occurred() ? NULL : PyLong_FromSize_t(count);
}

/* ---- repetition ---- */

/* Pieces that equal an earlier piece: their number and their characters. */
typedef struct {
    Table table;
    const byte **pieces;
    uint32_t *sizes;
    size_t count, repeated, characters;
} Pieces;

static int pieces_make(Pieces *set, size_t most) {
    memset(set, 0, sizeof(*set));
    set->pieces = PyMem_Malloc(most * sizeof(*set->pieces));
    set->sizes = PyMem_Malloc(most * sizeof(*set->sizes));
    return set->pieces == NULL || set->sizes == NULL ? -1 : table_make(&set->table, most);
}

static void pieces_free(Pieces *set) {
    PyMem_Free(set->pieces);
    PyMem_Free(set->sizes);
    PyMem_Free(set->table.slots);
}

static void pieces_add(Pieces *set, const byte *p, size_t size, const byte *limit) {
    size_t mask = set->table.size - 1, slot = hash_bytes(p, size, limit) & mask;
    for (uint32_t entry; (entry = set->table.slots[slot]) != 0; slot = (slot + 1) & mask)
        if (set->sizes[entry - 1] == size && memcmp(set->pieces[entry - 1], p, size) == 0) {
            set->repeated++;
            set->characters += count_characters(p, size);
            return;
        }
    set->pieces[set->count] = p;
    set->sizes[set->count] = (uint32_t)size;
    set->table.slots[slot] = (uint32_t)++set->count;
}

/* Splits the text at runs of at least `newlines` newlines; returns the number of pieces. */
static size_t separated(Pieces *set, const byte *start, const byte *end, int newlines) {
    size_t count = 0;
    const byte *limit = end, *piece = start, *p = start;
    while ((p = memchr(p, '\n', end - p)) != NULL) {
        const byte *run = p;
        while (p < end && *p == '\n') p++;
        if (p - run < newlines) continue;
        pieces_add(set, piece, run - piece, limit);
        count++;
        piece = p;
    }
    pieces_add(set, piece, end - piece, limit);
    return count + 1;
}

typedef struct {
    uint32_t start, size, chars, hash; /* bytes of the text, bytes, characters */
} Word;

typedef struct {
    Array words;
    size_t count;
} Words;

static int add_word(Words *words, size_t start, size_t size, size_t chars, uint64_t hash) {
    if (array_reserve(&words->words, words->count + 1, sizeof(Word)) < 0) return -1;
    Word *word = (Word *)words->words.items + words->count++;
    *word = (Word){(uint32_t)start, (uint32_t)size, (uint32_t)chars, (uint32_t)hash};
    return 0;
}

/* Sets ids[i] to the number of word i among the distinct words, of which the stop words come first. Returns their
 * number, or -1. */
static Py_ssize_t number_words(const Words *words, const byte *text, uint32_t *ids, int *stops) {
    const Word *word = words->words.items;
    size_t most = words->count + num_stop_words, mask, count = 0;
    const byte **known = PyMem_Malloc(most * sizeof(*known));
    uint32_t *sizes = PyMem_Malloc(most * sizeof(*sizes));
    Table table = {0};
    if (known == NULL || sizes == NULL || table_make(&table, most) < 0) goto out_of_memory;
    mask = table.size - 1;
    byte seen[MOST_STOP_WORDS] = {0};
    for (size_t i = 0; i < most; i++) {
        int stop = i < num_stop_words;
        const Word *w = stop ? NULL : &word[i - num_stop_words];
        const byte *p = stop ? (const byte *)stop_words[i] : text + w->start;
        size_t size = stop ? strlen(stop_words[i]) : w->size;
        size_t slot = (stop ? (uint32_t)hash_bytes(p, size, p + size) : w->hash) & mask;
        uint32_t entry;
        while ((entry = table.slots[slot]) != 0) {
            if (sizes[entry - 1] == size && memcmp(known[entry - 1], p, size) == 0) break;
            slot = (slot + 1) & mask;
        }
        if (entry == 0) {
            known[count] = p;
            sizes[count] = (uint32_t)size;
            entry = table.slots[slot] = (uint32_t)++count;
        }
        if (stop) continue;
        ids[i - num_stop_words] = entry - 1;
        if (entry <= num_stop_words) seen[entry - 1] = 1;
    }
    *stops = 0;
    for (size_t i = 0; i < num_stop_words; i++) *stops += seen[i];
    PyMem_Free((void *)known);
    PyMem_Free(sizes);
    PyMem_Free(table.slots);
    return (Py_ssize_t)count;
out_of_memory:
    PyMem_Free((void *)known);
    PyMem_Free(sizes);
    PyMem_Free(table.slots);
    return -1;
}

/* Finds which of `count` hashes may occur twice: may[i] is 0 only if no other hash is equal. Two passes over a few bits
 * per hash, without branches, are much faster than a hash table; `bits` has 4 * count + 8 bytes. */
static void may_repeat(const uint64_t *hashes, size_t count, byte *may, byte *bits) {
    size_t size = 64;
    while (size < 16 * count) size *= 2; /* at most 32 bits each */
    memset(bits, 0, size / 8);
    for (size_t i = 0; i < count; i++) {
        size_t bit = hashes[i] & (size - 1);
        may[i] = bits[bit / 8] >> bit % 8 & 1;
        bits[bit / 8] |= (byte)(1 << bit % 8);
    }
    memset(bits, 0, size / 8);
    for (size_t i = count; i-- > 0;) {
        size_t bit = hashes[i] & (size - 1);
        may[i] |= bits[bit / 8] >> bit % 8 & 1;
        bits[bit / 8] |= (byte)(1 << bit % 8);
    }
}

/* Sets top[0..2] to the length with spaces of the most frequent 2-, 3- and 4-gram times its count; of equally frequent
 * n-grams the first in the text. A repeated n-gram begins and ends with repeated (n-1)-grams, so only those are
 * examined: where[k] is the position of such an n-gram, grams[k] its number. */
static int top_ngrams(const Words *words, const uint32_t *ids, size_t top[3]) {
    const Word *word = words->words.items;
    size_t count = words->count, num = 0, failed = 1;
    size_t room = (count + 1) * sizeof(uint32_t);
    uint32_t *where = PyMem_Malloc(room), *grams = PyMem_Malloc(room);
    uint32_t *counts = PyMem_Malloc(room), *firsts = PyMem_Malloc(room);
    uint64_t *keys = PyMem_Malloc(2 * room);
    byte *may = PyMem_Malloc(count + 1), *bits = PyMem_Malloc(4 * count + 8);
    Table table = {0};
    top[0] = top[1] = top[2] = 0;
    if (!where || !grams || !counts || !firsts || !keys || !may || !bits) goto done;
    for (size_t i = 0; i + 1 < count; i++) {
        uint64_t h = mix(salt, (uint64_t)ids[i] << 32 | ids[i + 1]);
        keys[i] = h ^ h >> 32;
    }
    if (count > 1) may_repeat(keys, count - 1, may, bits);
    for (size_t i = 0; i + 1 < count; i++) {
        where[num] = (uint32_t)i;
        grams[num] = ids[i];
        num += may[i];
    }
    if (table_make(&table, num) < 0) goto done;
    for (size_t n = 2; n <= 4 && n <= count; n++) {
        size_t different = 0, mask = table.size - 1, best = 0, left = 0;
        memset(table.slots, 0, table.size * sizeof(uint32_t));
        for (size_t k = 0; k < num; k++) {
            uint64_t key = (uint64_t)grams[k] << 32 | ids[where[k] + n - 1], h = mix(salt, key);
            size_t slot = (h ^ h >> 32) & mask;
            uint32_t entry;
            while ((entry = table.slots[slot]) != 0 && keys[entry - 1] != key) slot = (slot + 1) & mask;
            if (entry == 0) {
                keys[different] = key;
                counts[different] = 0;
                firsts[different] = where[k];
                entry = table.slots[slot] = (uint32_t)++different;
            }
            counts[entry - 1]++;
            grams[k] = entry - 1;
        }
        for (size_t k = 1; k < different; k++)
            if (counts[k] > counts[best]) best = k;
        int repeated = different && counts[best] > 1;
        size_t first = repeated ? firsts[best] : 0, length = n - 1;
        for (size_t i = first; i < first + n; i++) length += word[i].chars;
        top[n - 2] = length * (repeated ? counts[best] : 1);
        for (size_t k = 0; k + 1 < num; k++) {
            if (where[k + 1] != where[k] + 1 || counts[grams[k]] < 2 || counts[grams[k + 1]] < 2) continue;
            where[left] = where[k];
            grams[left++] = grams[k];
        }
        num = left;
    }
    failed = 0;
done:
    PyMem_Free(where);
    PyMem_Free(grams);
    PyMem_Free(counts);
    PyMem_Free(firsts);
    PyMem_Free(keys);
    PyMem_Free(may);
    PyMem_Free(bits);
    PyMem_Free(table.slots);
    return failed ? -1 : 0;
}

/* Sets duplicates[0..5] to the number of characters in 5- to 10-grams that occurred before; after such an n-gram, its
 * words are skipped. Two n-grams are equal if their words, joined without spaces, are equal.
 *
 * `joined` has all words without spaces. Equal n-grams of at least BEGINNING bytes begin with the same BEGINNING bytes
 * in it. So only two kinds of positions are candidates: those whose BEGINNING bytes also begin at another word, and
 * those of shorter 5-grams. */
enum { BEGINNING = 12 };

static int duplicate_ngrams(const Words *words, const byte *text, size_t duplicates[6]) {
    const Word *word = words->words.items;
    size_t count = words->count, total = 0, candidates = 0, failed = 1;
    for (size_t n = 0; n < 6; n++) duplicates[n] = 0;
    if (count < 5) return 0;
    for (size_t i = 0; i < count; i++) total += word[i].size;
    byte *joined = PyMem_Malloc(total + 1), *may = PyMem_Malloc(count), *bits = PyMem_Malloc(4 * count + 8);
    uint32_t *offsets = PyMem_Malloc((count + 1) * sizeof(uint32_t)), *where = PyMem_Malloc(count * sizeof(uint32_t));
    uint64_t *hashes = PyMem_Malloc(count * sizeof(uint64_t));
    Table table = {0};
    if (!joined || !may || !bits || !offsets || !where || !hashes) goto done;
    const byte *limit = joined + total;
    total = 0;
    for (size_t i = 0; i < count; total += word[i++].size) {
        offsets[i] = (uint32_t)total;
        memcpy(joined + total, text + word[i].start, word[i].size);
    }
    offsets[count] = (uint32_t)total;
    for (size_t i = 0; i < count; i++) {
        const byte *p = joined + offsets[i];
        hashes[i] = limit - p < BEGINNING ? 0 : hash_bytes(p, BEGINNING, limit); /* else a short 5-gram */
    }
    may_repeat(hashes, count, may, bits);
    for (size_t i = 0; i + 5 <= count; i++)
        if (may[i] || offsets[i + 5] - offsets[i] < BEGINNING) where[candidates++] = (uint32_t)i;
    if (table_make(&table, candidates) < 0) goto done;
    size_t mask = table.size - 1;
    for (size_t n = 5; n <= 10 && n <= count; n++) {
        size_t allowed = 0, characters = 0;
        memset(table.slots, 0, table.size * sizeof(uint32_t));
        for (size_t k = 0; k < candidates && where[k] + n <= count; k++) {
            size_t i = where[k], size = offsets[i + n] - offsets[i];
            if (i < allowed) continue;
            const byte *p = joined + offsets[i];
            size_t slot = hash_bytes(p, size, limit) & mask;
            uint32_t entry;
            for (; (entry = table.slots[slot]) != 0; slot = (slot + 1) & mask)
                if (offsets[entry - 1 + n] - offsets[entry - 1] == size &&
                    memcmp(joined + offsets[entry - 1], p, size) == 0)
                    break;
            if (entry == 0) {
                table.slots[slot] = (uint32_t)i + 1;
                continue;
            }
            for (size_t w = i; w < i + n; w++) characters += word[w].chars;
            allowed = i + n;
        }
        duplicates[n - 5] = characters;
    }
    failed = 0;
done:
    PyMem_Free(joined);
    PyMem_Free(may);
    PyMem_Free(bits);
    PyMem_Free(hashes);
    PyMem_Free(offsets);
    PyMem_Free(where);
    PyMem_Free(table.slots);
    return failed ? -1 : 0;
}

/* ---- gopher ---- */

enum {
    CHARACTERS, NUM_WORDS, REAL_WORDS, REAL_CHARACTERS, ALPHABETIC_WORDS, HASHES, ELLIPSES, LINES, BULLET_LINES,
    ELLIPSIS_LINES, STOP_WORDS, PARAGRAPHS, DUPLICATE_PARAGRAPHS, DUPLICATE_PARAGRAPH_CHARACTERS, PIECES,
    DUPLICATE_LINES, DUPLICATE_LINE_CHARACTERS, TOP, DUPLICATE = TOP + 3, NUM_COUNTS = DUPLICATE + 6
};

static PyObject *tuple_of(const size_t *counts, int size) {
    PyObject *tuple = PyTuple_New(size);
    for (int i = 0; tuple != NULL && i < size; i++) {
        PyObject *number = PyLong_FromSize_t(counts[i]);
        if (number == NULL || PyTuple_SetItem(tuple, i, number) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static void count_word(size_t *counts, size_t chars, uint32_t any, int is_real) {
    counts[NUM_WORDS]++;
    counts[ALPHABETIC_WORDS] += (any & ALPHABETIC) != 0;
    if (is_real) {
        counts[REAL_WORDS]++;
        counts[REAL_CHARACTERS] += chars;
    }
}

/* Splits the chunk text[from:to] by the rules of spaCy, and adds and counts its words. */
static int count_chunk(Chunk *c, Words *words, size_t *counts, size_t from, size_t to) {
    if (split_chunk(c, from, to) < 0) return -1;
    for (size_t i = 0, start = 0; i < c->num_ends; start = c->ends[i++]) {
        uint32_t any = 0, all = ~(uint32_t)0;
        for (size_t k = start; k < c->ends[i]; k++) {
            any |= c->flags[k];
            all &= c->flags[k];
        }
        size_t chars = c->ends[i] - start, at = c->offsets[start];
        count_word(counts, chars, any, !(all & PUNCTUATION));
        size_t size = c->offsets[c->ends[i]] - at;
        if (add_word(words, at, size, chars, hash_bytes(c->text + at, size, c->limit)) < 0) return -1;
    }
    return 0;
}

/* Counts words and lines. The first and last words of a line show if it begins with a bullet or ends in an ellipsis. */
static int count_words(Chunk *c, Words *words, size_t *counts, const byte *text, const byte *end, int spacy) {
    int first = 1, dots = 0; /* no word in the line yet; its last word ends in an ellipsis */
    const byte *line = text;
    for (const byte *p = text; p < end;) {
        uint32_t any, all;
        size_t chars;
        const byte *next = chunk_end(p, end, &any, &all, &chars);
        if (next == p) {
            uint32_t flags = flags_of(next_character(&next));
            if (flags & BREAK) {
                if (*p == '\r' && next < end && *next == '\n') next++;
                counts[LINES] += spacy || !first;
                counts[ELLIPSIS_LINES] += dots;
                first = 1;
                dots = 0;
                line = next;
            }
            p = next;
            continue;
        }
        size_t size = next - p;
        if (any & HASH)
            for (const byte *q = p; q < next; q++) counts[HASHES] += *q == '#';
        dots = 0;
        if (any & STOP && size >= 3) {
            size_t run = 0;
            for (const byte *q = p; q < next; q++) {
                run = *q == '.' ? run + 1 : 0;
                if (run && run % 3 == 0) counts[ELLIPSES]++;
            }
            dots = run >= 3;
        }
        if (any & NOT_ASCII && size >= 3) {
            for (const byte *q = p; (q = memchr(q, 0xE2, next - q)) != NULL; q++)
                if (q[1] == 0x80 && q[2] == 0xA6) counts[ELLIPSES]++;
            dots |= memcmp(next - 3, "\xE2\x80\xA6", 3) == 0;
        }
        if (first) {
            const byte *behind = p;
            uint32_t sign = next_character(&behind);
            counts[BULLET_LINES] += spacy ? sign == '-' || sign == 0x2022 : (flags_of(sign) & BULLET) != 0;
            first = 0;
        }
        int failed = 0;
        uint64_t hash = hash_bytes(p, size, end);
        if (!spacy || is_plain(any, all, p, size, hash)) {
            count_word(counts, chars, any, any & ALPHANUMERIC);
            failed = add_word(words, p - text, size, chars, hash);
        } else {
            failed = count_chunk(c, words, counts, p - text, next - text);
        }
        if (failed) return -1;
        p = next;
    }
    if (line < end) {
        counts[LINES] += spacy || !first;
        counts[ELLIPSIS_LINES] += dots;
    }
    return page_failed ? -1 : 0;
}

static PyObject *gopher(PyObject *self, PyObject *args) {
    PyObject *object, *result = NULL;
    int spacy, stops = 0;
    size_t size, counts[NUM_COUNTS] = {0};
    (void)self;
    if (!PyArg_ParseTuple(args, "Up", &object, &spacy)) return NULL;
    const byte *text = utf8(object, &size), *end = text + size, *start = text, *stop = end;
    if (text == NULL) return NULL;
    Chunk c = {.text = text, .limit = end};
    Words words = {0};
    Pieces lines = {0}, paragraphs = {0};
    uint32_t *ids = NULL;
    counts[CHARACTERS] = count_characters(text, size);
    if (count_words(&c, &words, counts, text, end, spacy) < 0) goto done;
    ids = PyMem_Malloc((words.count + 1) * sizeof(uint32_t));
    if (ids == NULL) goto done;
    if (number_words(&words, text, ids, &stops) < 0 || top_ngrams(&words, ids, counts + TOP) < 0) goto done;
    if (duplicate_ngrams(&words, text, counts + DUPLICATE) < 0) goto done;
    size_t newlines = 0;
    for (size_t i = 0; i < size; i++) newlines += text[i] == '\n';
    strip(&start, &stop);
    if (pieces_make(&lines, newlines + 1) < 0 || pieces_make(&paragraphs, newlines / 2 + 1) < 0) goto done;
    counts[STOP_WORDS] = (size_t)stops;
    counts[PARAGRAPHS] = separated(&paragraphs, start, stop, 2);
    counts[DUPLICATE_PARAGRAPHS] = paragraphs.repeated;
    counts[DUPLICATE_PARAGRAPH_CHARACTERS] = paragraphs.characters;
    counts[PIECES] = separated(&lines, text, end, 1);
    counts[DUPLICATE_LINES] = lines.repeated;
    counts[DUPLICATE_LINE_CHARACTERS] = lines.characters;
    if (!PyErr_Occurred()) result = tuple_of(counts, NUM_COUNTS);
done:
    if (result == NULL && !PyErr_Occurred()) PyErr_NoMemory();
    pieces_free(&lines);
    pieces_free(&paragraphs);
    PyMem_Free(ids);
    PyMem_Free(words.words.items);
    PyMem_Free(c.memory.items);
    return result;
}

/* ---- fineweb ---- */

static PyObject *fineweb(PyObject *self, PyObject *args) {
    PyObject *object, *result = NULL;
    Py_ssize_t short_characters;
    int quotes;
    size_t size, newlines = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "Unp", &object, &short_characters, &quotes)) return NULL;
    const byte *text = utf8(object, &size), *end = text + size;
    if (text == NULL) return NULL;
    for (size_t i = 0; i < size; i++) newlines += text[i] == '\n';
    Pieces lines;
    size_t num_lines = 0, ended = 0, few = 0, words = 0;
    if (pieces_make(&lines, newlines + 1) < 0) {
        PyErr_NoMemory();
        goto done;
    }
    for (const byte *line = text, *stop; line <= end; line = stop + 1) {
        stop = memchr(line, '\n', end - line);
        if (stop == NULL) stop = end;
        size_t before = words;
        for (const byte *p = line; p < stop;) {
            uint32_t any, all;
            size_t chars;
            const byte *next = chunk_end(p, stop, &any, &all, &chars);
            if (next == p) next_character(&next);
            else words++;
            p = next;
        }
        if (words == before) continue; /* a blank line */
        num_lines++;
        const byte *last = stop;
        uint32_t c = previous_character(&last);
        ended += flags_of(c) & TERMINAL || (quotes && (c == '"' || c == '\'' || c == 0x201D || c == 0x2019 ||
                                                       c == 0xBB || c == ELLIPSIS));
        few += (Py_ssize_t)count_characters(line, stop - line) <= short_characters;
        pieces_add(&lines, line, stop - line, end);
    }
    size_t counts[] = {count_characters(text, size) - newlines, words, newlines, num_lines, ended, few,
                       lines.characters};
    if (!PyErr_Occurred()) result = tuple_of(counts, 7);
done:
    pieces_free(&lines);
    return result;
}

/* ---- c4 ---- */

static const char *const policies[] = {"terms of use", "privacy policy", "cookie policy",
                                       "uses cookies", "use of cookies", "use cookies"};
enum { TERMINAL_RULE = 1, JAVASCRIPT = 2, POLICY = 4, LOREM = 8, CURLY = 16, CITATIONS_FIRST = 32,
       SINGLE_QUOTES = 64 };

/* Checks whether the lower-case text contains `phrase`. */
static int holds(const byte *p, const byte *end, const char *phrase) {
    size_t size = strlen(phrase);
    while ((size_t)(end - p) >= size && (p = memchr(p, phrase[0], end - p - size + 1)) != NULL) {
        if (memcmp(p, phrase, size) == 0) return 1;
        p++;
    }
    return 0;
}

static int holds_policy(const byte *p, const byte *end) {
    for (size_t i = 0; i < sizeof(policies) / sizeof(*policies); i++)
        if (holds(p, end, policies[i])) return 1;
    return 0;
}

/* Returns the bytes of a citation mark ([], [12], [edit], [citation needed]) at p, 0 if there is none. */
static size_t citation(const byte *p, const byte *end) {
    const byte *q = p + 1;
    while (q < end) {
        const byte *next = q;
        if (!(flags_of(next_character(&next)) & DECIMAL)) break;
        q = next;
    }
    if (q < end && *q == ']') return q + 1 - p;
    if (end - p >= 6 && memcmp(p, "[edit]", 6) == 0) return 6;
    return end - p >= 17 && memcmp(p, "[citation needed]", 17) == 0 ? 17 : 0;
}

/* Copies [p, end) without citation marks; returns the number of bytes written. */
static size_t without_citations(byte *to, const byte *p, const byte *end) {
    byte *start = to;
    while (p < end) {
        const byte *bracket = memchr(p, '[', end - p);
        if (bracket == NULL) bracket = end;
        memcpy(to, p, bracket - p);
        to += bracket - p;
        p = bracket;
        if (p == end) break;
        size_t size = citation(p, end);
        if (size) p += size;
        else *to++ = *p++;
    }
    return to - start;
}

/* Counts the words of a line, and checks whether one has more than `longest` characters. */
static size_t line_words(const byte *p, const byte *end, size_t longest, int *too_long) {
    size_t count = 0;
    while (p < end) {
        uint32_t any, all;
        size_t chars;
        const byte *next = chunk_end(p, end, &any, &all, &chars);
        if (next == p) {
            next_character(&p);
            continue;
        }
        count++;
        *too_long |= chars > longest;
        p = next;
    }
    return count;
}

static int ends_sentence(const byte *p, const byte *end, int single_quotes) {
    if (p == end || strchr(single_quotes ? ".?!\"'" : ".?!\"", end[-1]) == NULL || end[-1] == 0) return 0;
    return end - p < 3 || memcmp(end - 3, "...", 3) != 0;
}

static PyObject *c4(PyObject *self, PyObject *args) {
    PyObject *object, *result = NULL;
    Py_ssize_t longest, fewest;
    unsigned int rules;
    size_t size, made = 0, kept = 0;
    const char *reason = "";
    (void)self;
    if (!PyArg_ParseTuple(args, "UnnI", &object, &longest, &fewest, &rules)) return NULL;
    const byte *text = utf8(object, &size), *end = text + size;
    if (text == NULL) return NULL;
    /* lower: the text in lower case; for a line that lost citation marks, that line. Only A-Z are converted: of all other
     * characters, only the Kelvin sign has a lower-case letter that is in a phrase, and then the reference is used. */
    byte *out = PyMem_Malloc(size + 1), *lower = PyMem_Malloc(size + 1), *line_lower = PyMem_Malloc(size + 1);
    byte *cleaned = PyMem_Malloc(size + 1);
    if (!out || !lower || !line_lower || !cleaned) {
        PyErr_NoMemory();
        goto done;
    }
    for (size_t i = 0; i < size; i++) lower[i] = text[i] | ((byte)(text[i] - 'A') < 26) << 5;
    int javascript = rules & JAVASCRIPT && holds(lower, lower + size, "javascript");
    int policy = rules & POLICY && holds_policy(lower, lower + size);
    int lorem = rules & LOREM && holds(lower, lower + size, "lorem ipsum");
    for (const byte *p = text, *next; p < end; p = next) {
        const byte *stop = p;
        int bracket = 0;
        for (next = p;; stop = next) { /* to the end of the line */
            if (next == end) break;
            bracket |= *next == '[';
            uint32_t flags = byte_flags[*next];
            if (flags & NOT_ASCII) flags = flags_of(next_character(&next));
            else next++;
            if (!(flags & BREAK)) continue;
            if (next[-1] == '\r' && next < end && *next == '\n') next++;
            break;
        }
        if (page_failed) goto done;
        const byte *from = p, *to = stop, *small;
        int has_javascript = javascript, has_policy = policy, has_lorem = lorem, too_long = 0;
        if (bracket && rules & CITATIONS_FIRST) {
            to = cleaned + without_citations(cleaned, from, to);
            from = cleaned;
        }
        strip(&from, &to);
        size_t words = line_words(from, to, (size_t)longest, &too_long);
        if (too_long) continue;
        if (bracket && !(rules & CITATIONS_FIRST)) {
            to = cleaned + without_citations(cleaned, from, to);
            from = cleaned;
        }
        if (rules & TERMINAL_RULE && !ends_sentence(from, to, rules & SINGLE_QUOTES)) continue;
        if (words < (size_t)fewest) continue;
        if (bracket) {
            for (size_t i = 0; i < (size_t)(to - from); i++)
                line_lower[i] = from[i] | ((byte)(from[i] - 'A') < 26) << 5;
            small = line_lower;
            has_javascript = rules & JAVASCRIPT;
            has_policy = rules & POLICY;
            has_lorem = rules & LOREM;
        } else {
            small = lower + (from - text);
        }
        const byte *small_end = small + (to - from);
        if (has_lorem && holds(small, small_end, "lorem ipsum")) reason = "lorem_ipsum";
        else if (has_javascript && holds(small, small_end, "javascript")) continue;
        else if (rules & CURLY && memchr(from, '{', to - from) != NULL) reason = "curly_bracket";
        else if (has_policy && holds_policy(small, small_end)) continue;
        if (*reason) break;
        if (kept++) out[made++] = '\n';
        memcpy(out + made, from, to - from);
        made += to - from;
    }
    if (!PyErr_Occurred()) result = Py_BuildValue("sns#", reason, (Py_ssize_t)kept, out, (Py_ssize_t)made);
done:
    PyMem_Free(out);
    PyMem_Free(lower);
    PyMem_Free(line_lower);
    PyMem_Free(cleaned);
    return result;
}

/* ---- signs ---- */

/* Returns those of `signs` that are in `data`, in the order of `signs`. masks: 3 * 256 numbers; for each position 0 .. 2
 * and byte value, a bit per sign that may have this byte at this position: see ingot.data.filters.junk. */
static PyObject *signs(PyObject *self, PyObject *args) {
    const byte *data, *masks;
    Py_ssize_t size, masks_size;
    PyObject *tuple;
    uint64_t may_be[3][256], found = 0;
    (void)self;
    if (!PyArg_ParseTuple(args, "y#O!y#", &data, &size, &PyTuple_Type, &tuple, &masks, &masks_size)) return NULL;
    Py_ssize_t count = PyTuple_Size(tuple);
    if (masks_size != sizeof(may_be) || count > 64) {
        PyErr_SetString(PyExc_ValueError, "at most 64 signs, with 768 masks");
        return NULL;
    }
    memcpy(may_be, masks, sizeof(may_be));
    for (Py_ssize_t i = 0; i + 1 < size; i++) {
        uint64_t may = may_be[0][data[i]] & may_be[1][data[i + 1]];
        if (may == 0) continue; /* true for nine of ten bytes */
        may &= ~found;
        if (i + 2 < size) may &= may_be[2][data[i + 2]];
        for (Py_ssize_t n = 0; may != 0 && n < count; n++, may >>= 1) {
            if (!(may & 1)) continue;
            char *sign;
            Py_ssize_t length;
            if (PyBytes_AsStringAndSize(PyTuple_GetItem(tuple, n), &sign, &length) < 0) return NULL;
            if (length <= size - i && memcmp(data + i, sign, (size_t)length) == 0) found |= (uint64_t)1 << n;
        }
    }
    PyObject *list = PyList_New(0);
    for (Py_ssize_t n = 0; list != NULL && n < count; n++)
        if (found >> n & 1 && PyList_Append(list, PyTuple_GetItem(tuple, n)) < 0) Py_CLEAR(list);
    return list;
}

/* ---- tables from Python ---- */

static char *copy_of(PyObject *text) {
    Py_ssize_t size;
    const char *data = PyUnicode_AsUTF8AndSize(text, &size);
    char *copy = data != NULL ? PyMem_Malloc((size_t)size + 1) : NULL;
    if (copy == NULL && data != NULL) PyErr_NoMemory();
    return copy != NULL ? memcpy(copy, data, (size_t)size + 1) : NULL;
}

static int fill_ends(PyObject *numbers, byte *ends, Py_ssize_t most) {
    Py_ssize_t size = PyTuple_Size(numbers);
    if (size > most) PyErr_SetString(PyExc_ValueError, "a special case has too many words");
    for (Py_ssize_t i = 0; i < size && !PyErr_Occurred(); i++)
        ends[i] = (byte)PyLong_AsLong(PyTuple_GetItem(numbers, i));
    return PyErr_Occurred() ? -1 : (int)size;
}

/* cases: (text, ends of the words it becomes, ends of the words that are joined to it); ends count characters. */
static int take_specials(PyObject *cases) {
    Py_ssize_t count = PyList_Size(cases);
    if (count < 0) return -1;
    specials = PyMem_Calloc((size_t)count + 1, sizeof(Special));
    if (specials == NULL || table_make(&special_table, (size_t)count) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *text, *ends, *cuts;
        Special *special = &specials[i];
        if (!PyArg_ParseTuple(PyList_GetItem(cases, i), "UO!O!", &text, &PyTuple_Type, &ends, &PyTuple_Type, &cuts))
            return -1;
        int parts = fill_ends(ends, special->ends, MOST_PARTS), joined = fill_ends(cuts, special->cuts, MOST_JOINED);
        if (parts < 0 || joined < 0 || (special->bytes = (byte *)copy_of(text)) == NULL) return -1;
        size_t size = special->size = (uint32_t)strlen((char *)special->bytes);
        if (size < 1 || size > 63) {
            PyErr_SetString(PyExc_ValueError, "a special case must have 1 to 63 bytes");
            return -1;
        }
        special->parts = (byte)parts;
        special->joined = (byte)joined;
        special_sizes[*special->bytes] |= (uint64_t)1 << size;
        if (joined) joined_sizes[*special->bytes] |= (uint64_t)1 << size;
        size_t chars = count_characters(special->bytes, size), mask = special_table.size - 1;
        if (chars > longest_special) longest_special = chars;
        size_t slot = hash_bytes(special->bytes, size, special->bytes + size) & mask;
        while (special_table.slots[slot]) slot = (slot + 1) & mask;
        special_table.slots[slot] = (uint32_t)i + 1;
    }
    return 0;
}

static int take_strings(PyObject *tuple, char **strings, size_t most, size_t *count) {
    Py_ssize_t size = PyTuple_Size(tuple);
    if (size < 0 || (size_t)size > most) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many strings");
        return -1;
    }
    for (Py_ssize_t i = 0; i < size; i++)
        if ((strings[i] = copy_of(PyTuple_GetItem(tuple, i))) == NULL) return -1;
    *count = (size_t)size;
    return 0;
}

static PyObject *setup(PyObject *self, PyObject *args) {
    PyObject *source, *cases, *unit_tuple, *stop_tuple;
    unsigned long long salt_given;
    (void)self;
    if (!PyArg_ParseTuple(args, "OO!O!O!K", &source, &PyList_Type, &cases, &PyTuple_Type, &unit_tuple, &PyTuple_Type,
                          &stop_tuple, &salt_given))
        return NULL;
    if (page_source != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "setup was already called");
        return NULL;
    }
    salt = salt_given | 1;
    page_source = Py_NewRef(source);
    const uint32_t *ascii = load_page(0);
    if (PyErr_Occurred()) goto failed;
    for (int i = 0; i < 256; i++) byte_flags[i] = i < 0x80 ? ascii[i] : NOT_ASCII;
    byte_flags['#'] |= HASH;
    byte_flags['.'] |= STOP;
    if (take_specials(cases) < 0) goto failed;
    if (take_strings(unit_tuple, units, sizeof(units) / sizeof(*units), &num_units) < 0) goto failed;
    if (take_strings(stop_tuple, stop_words, MOST_STOP_WORDS, &num_stop_words) < 0) goto failed;
    for (size_t i = 0; i < num_units; i++) {
        unit_sizes[i] = strlen(units[i]);
        size_t chars = count_characters((byte *)units[i], unit_sizes[i]);
        if (chars > longest_unit) longest_unit = chars;
    }
    Py_RETURN_NONE;
failed: /* only if memory is short; the memory already allocated stays with the module */
    return NULL;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(page, cases, units, stop_words, salt): once, before anything else"},
    {"words", words, METH_O, "words(text) -> list[str]"},
    {"sentences", sentences, METH_O, "sentences(text) -> int"},
    {"gopher", gopher, METH_VARARGS, "gopher(text, spacy) -> the fields of GopherCounts"},
    {"fineweb", fineweb, METH_VARARGS, "fineweb(text, short_characters, quotes) -> the fields of FineWebCounts"},
    {"c4", c4, METH_VARARGS, "c4(text, word_length, line_words, rules) -> (reason, lines kept, those lines)"},
    {"signs", signs, METH_VARARGS, "signs(data, signs, masks) -> those that are in data"},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_quality", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__quality(void) { return PyModule_Create(&module); }
