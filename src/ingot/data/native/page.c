/* Parses HTML into flat pre-order arrays, in one pass and in linear time. The specification is
 * ingot/data/extract/page_reference.py, which gives the same arrays; both use the tables of
 * ingot/data/extract/tags.py and vocabulary.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GROUPS = 12, BARRIERS = 4, STRIDE = 64, WORD_STRIDE = 32, SAME_NAME_STEPS = 16, MAX_TAGS = 256 };
enum { VOID = 1, RAW = 2, RAW_TO_END = 4, HEADING = 8, PRE = 16, FOREIGN = 32, ONCE = 64, NO_END = 128 };
enum { PLAIN = 1, NAMED = 2, TARGET = 3 };                   /* kinds of attributes */
enum { OTHER = 1, BREAK = 2 };                               /* tag ids that the code refers to */
enum { FINE = 0, TOO_DEEP = 1, TOO_MANY = 2, NO_MEMORY = 3 };
#define MARKED ((uint64_t)1 << 63) /* on an element: has href; on text: follows white space */
#define HYPHEN 27
#define EQUALS 28

typedef struct {
    uint16_t rules, member, closes, stops;
    uint8_t barrier_of, barrier;
} TagRules;

typedef struct {
    Py_ssize_t num_names, num_words;
    uint16_t *names;      /* [num_names][STRIDE]: trie over tag names and, after '=', attribute names */
    uint8_t *name_ids;    /* [num_names]: tag id or kind of attribute, 0 for none */
    uint16_t *words;      /* [num_words][WORD_STRIDE]: automaton over attribute values */
    uint64_t *word_flags; /* [num_words] */
    TagRules tags[MAX_TAGS];
    uint8_t name_symbol[256], word_symbol[256]; /* 0: none */
} Tables;

typedef struct {
    int32_t node, same; /* index of the element; stack index of the open element with the same tag below, or -1 */
    int32_t name, name_length;
    int16_t nearest[GROUPS], barrier[BARRIERS];
    uint8_t tag, pre, foreign;
} Frame;

typedef struct {
    Py_ssize_t size, capacity;
    uint8_t *tag;
    uint64_t *flags;
    int32_t *parent, *end, *depth, *start, *stop, *chars, *marks;
} Nodes;

typedef struct {
    const uint8_t *data;
    Py_ssize_t length;
    const Tables *tables;
    Frame *stack;
    int32_t height, max_depth;
    Py_ssize_t max_nodes;
    int32_t last[MAX_TAGS];      /* stack index of the innermost open element of a tag, or -1 */
    uint8_t unclosed[MAX_TAGS];  /* a raw element of this tag has no end tag from here on */
    uint8_t space;               /* white space was passed over since the last text node */
    Nodes nodes;
    int status;
} Parser;

static inline int is_space(uint8_t c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r' || c == '\f'; }
static inline int is_letter(uint8_t c) { return (uint8_t)((c | 32) - 'a') < 26; }
static inline int is_digit(uint8_t c) { return (uint8_t)(c - '0') < 10; }

/* ---- nodes ---- */

static int grow(Nodes *n) {
    Py_ssize_t capacity = n->capacity ? n->capacity * 2 : 4096;
#define GROW(field)                                                                    \
    do {                                                                               \
        void *grown = realloc(n->field, (size_t)capacity * sizeof *n->field);          \
        if (!grown) return 0;                                                          \
        n->field = grown;                                                              \
    } while (0)
    GROW(tag); GROW(flags); GROW(parent); GROW(end); GROW(depth); GROW(start); GROW(stop); GROW(chars); GROW(marks);
    n->capacity = capacity;
    return 1;
}

static int32_t add_node(Parser *p, int tag, uint64_t flags, Py_ssize_t start, Py_ssize_t stop) {
    Nodes *n = &p->nodes;
    if (n->size >= p->max_nodes) { p->status = TOO_MANY; return -1; }
    if (n->size == n->capacity && !grow(n)) { p->status = NO_MEMORY; return -1; }
    int32_t i = (int32_t)n->size++;
    n->tag[i] = (uint8_t)tag;
    n->flags[i] = flags;
    n->parent[i] = p->height ? p->stack[p->height - 1].node : -1;
    n->end[i] = i + 1;
    n->depth[i] = p->height;
    n->start[i] = (int32_t)start;
    n->stop[i] = (int32_t)stop;
    n->chars[i] = n->marks[i] = 0;
    return i;
}

/* ---- the stack of open elements ---- */

static void pop_to(Parser *p, int32_t height) {
    while (p->height > height) {
        Frame *f = &p->stack[--p->height];
        p->nodes.end[f->node] = (int32_t)p->nodes.size;
        p->last[f->tag] = f->same;
    }
}

static void push(Parser *p, int tag, int32_t node, Py_ssize_t name, Py_ssize_t name_length) {
    const TagRules *rules = &p->tables->tags[tag];
    Frame *f = &p->stack[p->height];
    if (p->height) {
        *f = f[-1];
    } else {
        memset(f, 0, sizeof *f);
        for (int g = 0; g < GROUPS; g++) f->nearest[g] = -1;
        for (int b = 0; b < BARRIERS; b++) f->barrier[b] = -1;
    }
    for (int g = 0; g < GROUPS; g++) {
        if (rules->stops >> g & 1) f->nearest[g] = -1;
        if (rules->member >> g & 1) f->nearest[g] = (int16_t)p->height;
    }
    for (int b = 0; b < BARRIERS; b++)
        if (rules->barrier_of >> b & 1) f->barrier[b] = (int16_t)p->height;
    f->pre |= (rules->rules & PRE) != 0;
    f->foreign |= (rules->rules & FOREIGN) != 0;
    f->tag = (uint8_t)tag;
    f->node = node;
    f->name = (int32_t)name;
    f->name_length = (int32_t)name_length;
    f->same = p->last[tag];
    p->last[tag] = p->height++;
}

static int same_name(const Parser *p, const Frame *f, Py_ssize_t name, Py_ssize_t length) {
    if (f->name_length != length) return 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        uint8_t a = p->data[f->name + i], b = p->data[name + i];
        if (a != b && !(is_letter(a) && (a ^ 32) == b)) return 0;
    }
    return 1;
}

static void end_tag(Parser *p, int tag, Py_ssize_t name, Py_ssize_t length) {
    const TagRules *rules = &p->tables->tags[tag];
    if (!p->height || rules->rules & NO_END) return;
    const Frame *top = &p->stack[p->height - 1];
    int32_t target = p->last[tag];
    if (rules->rules & HEADING) {
        target = -1;
        for (int g = 0; g < GROUPS; g++)
            if (rules->member >> g & 1) target = top->nearest[g];
    } else if (tag == OTHER) {
        int steps = SAME_NAME_STEPS;
        while (target >= 0 && !same_name(p, &p->stack[target], name, length))
            target = --steps ? p->stack[target].same : -1;
    }
    if (target >= 0 && target >= top->barrier[rules->barrier]) pop_to(p, target);
}

/* ---- text ---- */

static void add_text(Parser *p, Py_ssize_t start, Py_ssize_t stop) {
    const uint8_t *d = p->data;
    int32_t chars = 0, marks = 0;
    for (Py_ssize_t i = start; i < stop; i++) {
        uint8_t c = d[i];
        if (c < 0x80) {
            if (is_space(c)) continue;
            chars++;
            if (c == '.' || c == ',' || c == '!' || c == '?' || c == ';' || c == ':') {
                marks++;
            } else if (c == '&') { /* a character reference counts as one */
                Py_ssize_t j = i + 1, limit = i + 34 < stop ? i + 34 : stop;
                if (j < limit && d[j] == '#') j++;
                Py_ssize_t first = j;
                while (j < limit && (is_letter(d[j]) || is_digit(d[j]))) j++;
                if (j > first && j < limit && d[j] == ';') i = j;
            }
        } else if (c >= 0xC0) {
            uint8_t next = i + 1 < stop ? d[i + 1] : 0, third = i + 2 < stop ? d[i + 2] : 0;
            if (c == 0xC2 && next == 0xA0) continue; /* no-break space */
            chars += (c >= 0xE3 && c <= 0xED) || c == 0xF0 ? 2 : 1; /* ideographs, kana, hangul; emoji */
            if ((c == 0xE3 && next == 0x80 && (third == 0x81 || third == 0x82)) || /* ideographic comma, full stop */
                (c == 0xEF && next == 0xBC && (third == 0x8C || third == 0x81 || third == 0x9F)) || /* full width */
                (c == 0xD8 && (next == 0x8C || next == 0x9F)) ||            /* Arabic comma, question mark */
                (c == 0xE0 && next == 0xA5 && third == 0xA4))               /* danda */
                marks++;
        }
    }
    if (!chars && !(p->height && p->stack[p->height - 1].pre)) {
        if (stop > start) p->space = 1;
        return;
    }
    int32_t i = add_node(p, 0, p->space ? MARKED : 0, start, stop);
    if (i < 0) return;
    p->nodes.chars[i] = chars;
    p->nodes.marks[i] = marks;
    p->space = 0;
}

/* ---- tags ---- */

/* Returns the position after `</name` of a raw element (before whitespace, '/' or '>'), or -1; *stop: end of its text. */
static Py_ssize_t raw_end(const Parser *p, Py_ssize_t i, Py_ssize_t name, Py_ssize_t length, Py_ssize_t *stop) {
    const uint8_t *d = p->data;
    while (i < p->length) {
        const uint8_t *found = memchr(d + i, '<', (size_t)(p->length - i));
        if (!found) return -1;
        i = found - d + 1;
        if (i + length + 1 >= p->length || d[i] != '/') continue;
        Py_ssize_t k = 0;
        while (k < length && (d[i + 1 + k] | 32) == (d[name + k] | 32)) k++;
        uint8_t after = d[i + 1 + length];
        if (k == length && (is_space(after) || after == '/' || after == '>')) {
            *stop = i - 1;
            return i + 1 + length;
        }
    }
    return -1;
}

static uint32_t feed(const Tables *t, uint32_t state, int symbol) { return t->words[state * WORD_STRIDE + symbol]; }

/* Runs the automaton over bytes, as letters in lower case. All other bytes, and a change from lower to upper case, are
 * the symbol `joint`, which never occurs twice in a row. *last: the previous symbol; updated to the last symbol read. */
static uint32_t feed_run(const Tables *t, uint32_t state, const uint8_t *s, Py_ssize_t length, int joint, int *last,
                         uint64_t *flags) {
    uint8_t previous = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        uint8_t c = s[i];
        int symbol = t->word_symbol[c] ? t->word_symbol[c] : joint;
        if (c >= 'A' && c <= 'Z' && previous >= 'a' && previous <= 'z') {
            state = feed(t, state, joint);
            *flags |= t->word_flags[state];
        }
        previous = c;
        if (symbol == joint && *last == joint) continue;
        state = feed(t, state, symbol);
        *flags |= t->word_flags[state];
        *last = symbol;
    }
    return state;
}

/* The automaton reads a PLAIN value as "-value-", a NAMED value as "-name=value=" with "=" between its words. */
static uint64_t value_flags(const Tables *t, int kind, const uint8_t *name, Py_ssize_t name_length,
                            const uint8_t *value, Py_ssize_t value_length) {
    static const uint8_t end = ' ';
    uint64_t flags = 0;
    int last = HYPHEN, joint = kind == NAMED ? EQUALS : HYPHEN;
    uint32_t state = feed(t, 0, HYPHEN);
    if (kind == NAMED) {
        state = feed_run(t, state, name, name_length, joint, &last, &flags);
        state = feed_run(t, state, &end, 1, joint, &last, &flags);
    }
    state = feed_run(t, state, value, value_length, joint, &last, &flags);
    feed_run(t, state, &end, 1, joint, &last, &flags);
    return flags;
}

/* Reads the attributes from i on. Returns the position after '>', or -1 if the input ends inside the tag. */
static Py_ssize_t attributes(const Parser *p, Py_ssize_t i, uint64_t *flags, int *self_closing) {
    const uint8_t *d = p->data;
    const Tables *t = p->tables;
    Py_ssize_t length = p->length;
    *self_closing = 0;
    for (;;) {
        while (i < length && (is_space(d[i]) || d[i] == '/')) {
            *self_closing = d[i] == '/';
            i++;
        }
        if (i >= length) return -1;
        if (d[i] == '>') return i + 1;
        *self_closing = 0;
        Py_ssize_t name = i;
        uint32_t state = t->names[EQUALS];
        do state = t->names[state * STRIDE + t->name_symbol[d[i++]]];
        while (i < length && !is_space(d[i]) && d[i] != '/' && d[i] != '>' && d[i] != '=');
        Py_ssize_t name_length = i - name, value = i, value_length = 0;
        while (i < length && is_space(d[i])) i++;
        if (i < length && d[i] == '=') {
            i++;
            while (i < length && is_space(d[i])) i++;
            if (i >= length) return -1;
            if (d[i] == '"' || d[i] == '\'') {
                const uint8_t *quote = memchr(d + i + 1, d[i], (size_t)(length - i - 1));
                if (!quote) return -1;
                value = i + 1;
                value_length = quote - d - value;
                i = quote - d + 1;
            } else {
                value = i;
                while (i < length && !is_space(d[i]) && d[i] != '>') i++;
                value_length = i - value;
            }
        }
        int kind = t->name_ids[state];
        if (kind == TARGET) *flags |= MARKED;
        else if (kind) *flags |= value_flags(t, kind, d + name, name_length, d + value, value_length);
    }
}

static Py_ssize_t tag_name(const Parser *p, Py_ssize_t i, int *tag) {
    const uint8_t *d = p->data;
    uint32_t state = 0;
    do state = p->tables->names[state * STRIDE + p->tables->name_symbol[d[i++]]];
    while (i < p->length && !is_space(d[i]) && d[i] != '/' && d[i] != '>');
    int id = p->tables->name_ids[state];
    *tag = id ? id : OTHER;
    return i;
}

static Py_ssize_t start_tag(Parser *p, Py_ssize_t i) {
    Py_ssize_t name = i;
    int tag, self_closing;
    uint64_t flags = 0;
    i = tag_name(p, i, &tag);
    Py_ssize_t name_length = i - name, behind = attributes(p, i, &flags, &self_closing);
    if (behind < 0) return -1;
    const TagRules *rules = &p->tables->tags[tag];
    if (rules->rules & ONCE && p->last[tag] >= 0) return behind;
    if (p->height) {
        const Frame *top = &p->stack[p->height - 1];
        int32_t target = p->height;
        for (int g = 0; g < GROUPS; g++)
            if (rules->closes >> g & 1 && top->nearest[g] >= 0 && top->nearest[g] < target) target = top->nearest[g];
        pop_to(p, target);
    }
    int foreign = p->height && p->stack[p->height - 1].foreign;
    Py_ssize_t start = i, stop = behind - 1, end = -1;
    int raw = rules->rules & RAW && !p->unclosed[tag] && !(foreign && !(rules->rules & RAW_TO_END));
    if (raw) {
        end = raw_end(p, behind, name, name_length, &stop);
        if (end < 0) {
            p->unclosed[tag] = 1;
            raw = rules->rules & RAW_TO_END;
            stop = raw ? p->length : behind - 1;
        }
        if (raw) start = behind;
    }
    int32_t node = add_node(p, tag, flags, start, stop);
    if (node < 0) return -1;
    if (raw) {
        if (end < 0) return -1;
        return attributes(p, end, &flags, &self_closing);
    }
    if (rules->rules & VOID || (self_closing && (foreign || tag == OTHER || rules->rules & FOREIGN))) return behind;
    if (p->height >= p->max_depth) { p->status = TOO_DEEP; return -1; }
    push(p, tag, node, name, name_length);
    return behind;
}

/* Returns the position after the next `pattern` (of `length` bytes) from i on, or the end of the input. */
static Py_ssize_t behind(const Parser *p, Py_ssize_t i, const char *pattern, Py_ssize_t length) {
    while (i + length <= p->length) {
        const uint8_t *found = memchr(p->data + i, pattern[0], (size_t)(p->length - length + 1 - i));
        if (!found) break;
        if (!memcmp(found, pattern, (size_t)length)) return found - p->data + length;
        i = found - p->data + 1;
    }
    return p->length;
}

static Py_ssize_t comment(const Parser *p, Py_ssize_t i) { /* i: after "<!--" */
    const uint8_t *d = p->data;
    if (i < p->length && d[i] == '>') return i + 1;
    if (i + 1 < p->length && d[i] == '-' && d[i + 1] == '>') return i + 2;
    while (i < p->length) {
        const uint8_t *found = memchr(d + i, '-', (size_t)(p->length - i));
        if (!found) break;
        i = found - d + 1;
        if (i + 1 < p->length && d[i] == '-') {
            if (d[i + 1] == '>') return i + 2;
            if (d[i + 1] == '!' && i + 2 < p->length && d[i + 2] == '>') return i + 3;
        }
    }
    return p->length;
}

static void parse(Parser *p) {
    const uint8_t *d = p->data;
    Py_ssize_t i = 0, text = 0;
    while (i < p->length && p->status == FINE) {
        const uint8_t *found = memchr(d + i, '<', (size_t)(p->length - i));
        if (!found || found - d + 1 >= p->length) break;
        Py_ssize_t at = found - d, next = at + 1;
        uint8_t c = d[next];
        if (!is_letter(c) && c != '/' && c != '!' && c != '?') {
            i = next;
            continue;
        }
        add_text(p, text, at);
        if (p->status != FINE) break;
        if (is_letter(c)) {
            next = start_tag(p, next);
        } else if (c == '/' && next + 1 < p->length && is_letter(d[next + 1])) {
            int tag, unused;
            uint64_t flags = 0;
            Py_ssize_t name = next + 1, i_name = tag_name(p, name, &tag);
            next = attributes(p, i_name, &flags, &unused);
            if (next >= 0) {
                if (tag == BREAK) add_node(p, BREAK, 0, i_name, next - 1);
                else end_tag(p, tag, name, i_name - name);
            }
        } else if (c == '!' && next + 2 < p->length && d[next + 1] == '-' && d[next + 2] == '-') {
            next = comment(p, next + 3);
        } else if (c == '!' && p->height && p->stack[p->height - 1].foreign && p->length - next >= 8 &&
                   !memcmp(d + next, "![CDATA[", 8)) {
            next = behind(p, next + 8, "]]>", 3);
        } else {
            next = behind(p, next, ">", 1);
        }
        if (next < 0) next = p->length; /* the input ends inside a tag or a script */
        i = text = next;
    }
    if (p->status == FINE) add_text(p, text, p->length);
    pop_to(p, 0);
}

/* ---- Python ---- */

static void free_tables(Tables *t) {
    if (!t) return;
    free(t->names); free(t->name_ids); free(t->words); free(t->word_flags); free(t);
}

static void destroy(PyObject *capsule) { free_tables(PyCapsule_GetPointer(capsule, "ingot.page.tables")); }

static void *copy_of(const char *data, Py_ssize_t size) {
    void *copy = malloc(size ? (size_t)size : 1);
    if (copy) memcpy(copy, data, (size_t)size);
    return copy;
}

static PyObject *py_tables(PyObject *self, PyObject *args) {
    (void)self;
    const char *names, *ids, *tags, *words, *flags;
    Py_ssize_t names_size, ids_size, tags_size, words_size, flags_size;
    if (!PyArg_ParseTuple(args, "y#y#y#y#y#", &names, &names_size, &ids, &ids_size, &tags, &tags_size, &words,
                          &words_size, &flags, &flags_size))
        return NULL;
    Py_ssize_t num_names = ids_size, num_words = flags_size / 8, num_tags = tags_size / 12;
    if (num_names < 1 || names_size != num_names * STRIDE * 2 || num_words < 1 || flags_size % 8 ||
        words_size != num_words * WORD_STRIDE * 2 || tags_size % 12 || num_tags < 3 || num_tags > MAX_TAGS) {
        PyErr_SetString(PyExc_ValueError, "tables: the sizes do not match");
        return NULL;
    }
    Tables *t = calloc(1, sizeof *t);
    if (!t) return PyErr_NoMemory();
    t->num_names = num_names;
    t->num_words = num_words;
    t->names = copy_of(names, names_size);
    t->name_ids = copy_of(ids, ids_size);
    t->words = copy_of(words, words_size);
    t->word_flags = copy_of(flags, flags_size);
    if (!t->names || !t->name_ids || !t->words || !t->word_flags) {
        free_tables(t);
        return PyErr_NoMemory();
    }
    int good = 1;
    for (Py_ssize_t i = 0; i < num_names * STRIDE; i++) good &= t->names[i] < num_names;
    for (Py_ssize_t i = 0; i < num_names; i++) good &= t->name_ids[i] < num_tags;
    for (Py_ssize_t i = 0; i < num_words * WORD_STRIDE; i++) good &= t->words[i] < num_words;
    for (Py_ssize_t i = 0; i < num_tags; i++) {
        uint16_t row[6]; /* rules, member, closes, stops, barrier_of, barrier */
        memcpy(row, tags + i * 12, 12);
        t->tags[i] = (TagRules){row[0], row[1], row[2], row[3], (uint8_t)row[4], (uint8_t)row[5]};
        good &= row[5] < BARRIERS;
    }
    if (!good) {
        free_tables(t);
        PyErr_SetString(PyExc_ValueError, "tables: a state or id is out of range");
        return NULL;
    }
    for (int c = 0; c < 256; c++) {
        int letter = is_letter((uint8_t)c) ? (c | 32) - 'a' + 1 : 0;
        t->word_symbol[c] = (uint8_t)letter;
        t->name_symbol[c] = (uint8_t)(letter ? letter : c == '-' ? HYPHEN : is_digit((uint8_t)c) ? 29 + c - '0' : 0);
    }
    PyObject *capsule = PyCapsule_New(t, "ingot.page.tables", destroy);
    if (!capsule) free_tables(t);
    return capsule;
}

static PyObject *py_parse(PyObject *self, PyObject *args) {
    (void)self;
    const char *data;
    Py_ssize_t length, max_depth, max_nodes;
    PyObject *capsule;
    if (!PyArg_ParseTuple(args, "y#Onn", &data, &length, &capsule, &max_depth, &max_nodes)) return NULL;
    const Tables *tables = PyCapsule_GetPointer(capsule, "ingot.page.tables");
    if (!tables) return NULL;
    if (length > INT32_MAX - 64 || max_depth < 1 || max_depth > 10000 || max_nodes < 1 || max_nodes > 100000000) {
        PyErr_SetString(PyExc_ValueError, "parse: input or limit out of range");
        return NULL;
    }
    Parser p = {.data = (const uint8_t *)data, .length = length, .tables = tables, .max_depth = (int32_t)max_depth,
                .max_nodes = max_nodes};
    for (int i = 0; i < MAX_TAGS; i++) p.last[i] = -1;
    p.stack = malloc((size_t)max_depth * sizeof *p.stack);
    if (!p.stack || !grow(&p.nodes)) p.status = NO_MEMORY;
    else parse(&p);
    Nodes *n = &p.nodes;
    PyObject *result = NULL;
    if (p.status == NO_MEMORY) {
        PyErr_NoMemory();
    } else {
        Py_ssize_t s = n->size;
#define COLUMN(field) (const char *)n->field, s * (Py_ssize_t)sizeof *n->field
        result = Py_BuildValue("iy#y#y#y#y#y#y#y#y#", p.status, COLUMN(tag), COLUMN(flags), COLUMN(parent),
                               COLUMN(end), COLUMN(depth), COLUMN(start), COLUMN(stop), COLUMN(chars), COLUMN(marks));
    }
    free(p.stack);
    free(n->tag); free(n->flags); free(n->parent); free(n->end); free(n->depth);
    free(n->start); free(n->stop); free(n->chars); free(n->marks);
    return result;
}

static PyMethodDef methods[] = {
    {"tables", py_tables, METH_VARARGS, "tables(names, name_ids, tags, words, word_flags) -> capsule for parse."},
    {"parse", py_parse, METH_VARARGS,
     "parse(html, tables, max_depth, max_nodes) -> (status, tag, flags, parent, end, depth, start, stop, chars, marks)."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_page", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__page(void) { return PyModule_Create(&module); }
