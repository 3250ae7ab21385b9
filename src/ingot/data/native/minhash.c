/* The loops of near-duplicate search (ingot.data.dedup). The reference implementations are next to the callers in Python.

   Word hashes are XXH3-64 (Collet, the specification of xxHash) with seed 0. Words of up to 64 bytes are hashed here;
   longer words, which are rare, by a callable of the xxhash package, so that its code for long input is not repeated.
   All arithmetic is modulo 2^32 or 2^64 and bytes are read little-endian, so results are equal on all machines. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LONGEST 64 /* bytes of a word that is hashed here */
#define BLOCK 4096  /* shingles between two passes over the permutations */
#define GROUP 32    /* permutations that stay in registers during a pass */

/* --- XXH3 ------------------------------------------------------------------------------------------------------ */

#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL

static const uint8_t SECRET[64] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
};

static inline uint32_t read32(const uint8_t *p) {
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t read64(const uint8_t *p) { return read32(p) | (uint64_t)read32(p + 4) << 32; }

static inline uint64_t rotate(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static inline uint64_t swap_bytes(uint64_t x) {
    x = (x & 0x00FF00FF00FF00FFULL) << 8 | (x >> 8 & 0x00FF00FF00FF00FFULL);
    x = (x & 0x0000FFFF0000FFFFULL) << 16 | (x >> 16 & 0x0000FFFF0000FFFFULL);
    return x << 32 | x >> 32;
}

/* Returns the exclusive or of the low and high half of the 128-bit product. */
static inline uint64_t fold(uint64_t a, uint64_t b) {
#ifdef __SIZEOF_INT128__
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t al = (uint32_t)a, ah = a >> 32, bl = (uint32_t)b, bh = b >> 32;
    uint64_t low = al * bl, cross = (low >> 32) + (uint32_t)(ah * bl) + al * bh;
    uint64_t high = ah * bh + (ah * bl >> 32) + (cross >> 32);
    return (cross << 32 | (uint32_t)low) ^ high;
#endif
}

static inline uint64_t avalanche(uint64_t h) {
    h = (h ^ h >> 37) * 0x165667919E3779F9ULL;
    return h ^ h >> 32;
}

static inline uint64_t mix16(const uint8_t *p, const uint8_t *secret) {
    return fold(read64(p) ^ read64(secret), read64(p + 8) ^ read64(secret + 8));
}

/* XXH3-64 of 1 to LONGEST bytes. */
static inline uint64_t word_hash(const uint8_t *p, size_t n) {
    if (n > 16) {
        uint64_t h = n * PRIME64_1;
        if (n > 32)
            h += mix16(p + 16, SECRET + 32) + mix16(p + n - 32, SECRET + 48);
        h += mix16(p, SECRET) + mix16(p + n - 16, SECRET + 16);
        return avalanche(h);
    }
    if (n > 8) {
        uint64_t low = read64(p) ^ read64(SECRET + 24) ^ read64(SECRET + 32);
        uint64_t high = read64(p + n - 8) ^ read64(SECRET + 40) ^ read64(SECRET + 48);
        return avalanche(n + swap_bytes(low) + high + fold(low, high));
    }
    if (n > 3) {
        uint64_t both = (uint64_t)read32(p) << 32 | read32(p + n - 4);
        uint64_t h = both ^ read64(SECRET + 8) ^ read64(SECRET + 16);
        h = (h ^ rotate(h, 49) ^ rotate(h, 24)) * 0x9FB21C651E98DF25ULL;
        h = (h ^ ((h >> 35) + n)) * 0x9FB21C651E98DF25ULL;
        return h ^ h >> 28;
    }
    uint32_t bytes = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
    uint64_t h = bytes ^ (uint64_t)(read32(SECRET) ^ read32(SECRET + 4));
    h = (h ^ h >> 33) * PRIME64_2;
    h = (h ^ h >> 29) * PRIME64_3;
    return h ^ h >> 32;
}

/* --- words ----------------------------------------------------------------------------------------------------- */

/* Returns the number of bytes of the whitespace character (of str.split) that begins at p, 0 if there is none. */
static inline size_t space_at(const uint8_t *p, const uint8_t *end) {
    uint8_t c = *p;
    if (c < 0x80)
        return c == ' ' || (c >= 9 && c <= 13) || (c >= 28 && c <= 31);
    if (c == 0xC2)
        return end - p > 1 && (p[1] == 0x85 || p[1] == 0xA0) ? 2 : 0;
    if (end - p < 3)
        return 0;
    if (c == 0xE2)
        return (p[1] == 0x80 && (p[2] <= 0x8A || p[2] == 0xA8 || p[2] == 0xA9 || p[2] == 0xAF)) ||
                       (p[1] == 0x81 && p[2] == 0x9F)
                   ? 3
                   : 0;
    if (c == 0xE1)
        return p[1] == 0x9A && p[2] == 0x80 ? 3 : 0;
    return c == 0xE3 && p[1] == 0x80 && p[2] == 0x80 ? 3 : 0;
}

/* --- shingles -------------------------------------------------------------------------------------------------- */

/* The destination of shingles: they are kept in the growing array `all`, or their low halves update the minima. */
typedef struct {
    uint64_t *all;
    size_t count, room;
    const uint32_t *factors, *offsets;
    uint32_t *least; /* NULL: keep all */
    size_t permutations;
    size_t waiting;
    uint32_t block[BLOCK];
} Sink;

typedef void (*Pass)(const uint32_t *, size_t, const uint32_t *, const uint32_t *, uint32_t *, size_t);

static inline __attribute__((always_inline)) void pass_body(const uint32_t *low, size_t count, const uint32_t *factors,
                                                            const uint32_t *offsets, uint32_t *least,
                                                            size_t permutations) {
    size_t p = 0;
    for (; p + GROUP <= permutations; p += GROUP) {
        uint32_t a[GROUP], b[GROUP], m[GROUP];
        memcpy(a, factors + p, sizeof a);
        memcpy(b, offsets + p, sizeof b);
        memcpy(m, least + p, sizeof m);
        for (size_t i = 0; i < count; i++)
            for (int q = 0; q < GROUP; q++) {
                uint32_t value = a[q] * low[i] + b[q];
                m[q] = value < m[q] ? value : m[q];
            }
        memcpy(least + p, m, sizeof m);
    }
    for (; p < permutations; p++)
        for (size_t i = 0; i < count; i++) {
            uint32_t value = factors[p] * low[i] + offsets[p];
            least[p] = value < least[p] ? value : least[p];
        }
}

static void pass_plain(const uint32_t *low, size_t count, const uint32_t *factors, const uint32_t *offsets,
                       uint32_t *least, size_t permutations) {
    pass_body(low, count, factors, offsets, least, permutations);
}

static Pass pass = pass_plain;

#if defined(__x86_64__) && defined(__GNUC__)
__attribute__((target("avx2"))) static void pass_avx2(const uint32_t *low, size_t count, const uint32_t *factors,
                                                      const uint32_t *offsets, uint32_t *least, size_t permutations) {
    pass_body(low, count, factors, offsets, least, permutations);
}

static void choose_pass(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        pass = pass_avx2;
}
#else
static void choose_pass(void) {}
#endif

static void flush(Sink *sink) {
    pass(sink->block, sink->waiting, sink->factors, sink->offsets, sink->least, sink->permutations);
    sink->waiting = 0;
}

static inline int put(Sink *sink, uint64_t shingle) {
    if (sink->least) {
        sink->block[sink->waiting++] = (uint32_t)shingle;
        if (sink->waiting == BLOCK)
            flush(sink);
        return 0;
    }
    if (sink->count == sink->room) {
        size_t room = sink->room ? 2 * sink->room : 512;
        uint64_t *all = room <= SIZE_MAX / sizeof *all ? realloc(sink->all, room * sizeof *all) : NULL;
        if (!all) {
            PyErr_NoMemory();
            return -1;
        }
        sink->all = all;
        sink->room = room;
    }
    sink->all[sink->count++] = shingle;
    return 0;
}

#define MULTIPLIER 0x9E3779B97F4A7C15ULL

static inline uint64_t finish(uint64_t h) {
    h = (h ^ h >> 32) * 0xFF51AFD7ED558CCDULL;
    return h ^ h >> 29;
}

static int hash_long(PyObject *long_hash, const uint8_t *word, size_t size, uint64_t *hash) {
    PyObject *number = PyObject_CallFunction(long_hash, "y#", (const char *)word, (Py_ssize_t)size);
    if (!number)
        return -1;
    *hash = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    return *hash == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

/* Sends the hash of each run of `ngram` words to the sink: the rolling sum of word[k] * MULTIPLIER^(ngram - 1 - k), then
   mixed. */
static int each_shingle(const uint8_t *p, const uint8_t *end, size_t ngram, PyObject *long_hash, Sink *sink) {
    size_t words = 0, slot = 0, most = (size_t)(end - p) + 1;
    ngram = ngram < most ? ngram : most; /* the same shingle, as words <= bytes; bounds memory */
    uint64_t *window = calloc(ngram, sizeof *window), rolled = 0, leaving = 1;
    if (!window) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < ngram; i++)
        leaving *= MULTIPLIER;
    int failed = 0;
    while (p < end && !failed) {
        size_t space = space_at(p, end);
        if (space) {
            p += space;
            continue;
        }
        const uint8_t *word = p++;
        while (p < end && !space_at(p, end))
            p++;
        size_t size = (size_t)(p - word);
        uint64_t hash;
        if (size <= LONGEST)
            hash = word_hash(word, size);
        else if ((failed = hash_long(long_hash, word, size, &hash)))
            break;
        rolled = rolled * MULTIPLIER + hash - window[slot] * leaving;
        window[slot] = hash;
        slot = slot + 1 == ngram ? 0 : slot + 1;
        if (++words >= ngram)
            failed = put(sink, finish(rolled));
    }
    if (!failed && words < ngram)
        failed = put(sink, words ? finish(rolled) : 0);
    free(window);
    return failed;
}

/* Returns `text` as UTF-8; *owner keeps it alive (NULL: `text` itself does). Lone surrogates are allowed. */
static const uint8_t *utf8_of(PyObject *text, Py_ssize_t *size, PyObject **owner) {
    *owner = NULL;
    const char *bytes = PyUnicode_AsUTF8AndSize(text, size);
    if (bytes || !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return (const uint8_t *)bytes;
    PyErr_Clear();
    char *inner;
    *owner = PyUnicode_AsEncodedString(text, "utf-8", "surrogatepass");
    if (!*owner || PyBytes_AsStringAndSize(*owner, &inner, size)) {
        Py_CLEAR(*owner);
        return NULL;
    }
    return (const uint8_t *)inner;
}

static int check_ngram(Py_ssize_t ngram) {
    if (ngram >= 1)
        return 0;
    PyErr_SetString(PyExc_ValueError, "ngram must be at least 1");
    return -1;
}

/* Gets a contiguous buffer of whole items of `size` bytes; the item format is not checked. */
static int take(PyObject *object, Py_buffer *view, Py_ssize_t size, int flags) {
    if (PyObject_GetBuffer(object, view, flags))
        return -1;
    if (view->len % size == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_ValueError, "the buffer does not consist of whole items");
    return -1;
}

static PyObject *shingles(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *text, *long_hash, *owner, *result = NULL;
    Py_ssize_t ngram, size;
    if (!PyArg_ParseTuple(args, "UnO", &text, &ngram, &long_hash) || check_ngram(ngram))
        return NULL;
    const uint8_t *bytes = utf8_of(text, &size, &owner);
    Sink *sink = bytes ? calloc(1, sizeof *sink) : NULL;
    if (bytes && !sink)
        PyErr_NoMemory();
    if (sink) {
        if (!each_shingle(bytes, bytes + size, (size_t)ngram, long_hash, sink))
            result = PyBytes_FromStringAndSize((const char *)sink->all, (Py_ssize_t)(sink->count * sizeof *sink->all));
        free(sink->all);
        free(sink);
    }
    Py_XDECREF(owner);
    return result;
}

/* Makes the result of `minima` and `signature`, with the greatest value at all places, and the sink that lowers them. */
static PyObject *start_minima(Sink *sink, const Py_buffer *factors, const Py_buffer *offsets) {
    if (factors->len != offsets->len) {
        PyErr_SetString(PyExc_ValueError, "factors and offsets differ in length");
        return NULL;
    }
    PyObject *result = PyBytes_FromStringAndSize(NULL, factors->len);
    if (!result)
        return NULL;
    char *inner;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(result, &inner, &size)) {
        Py_DECREF(result);
        return NULL;
    }
    memset(inner, 0xFF, (size_t)size);
    sink->factors = factors->buf;
    sink->offsets = offsets->buf;
    sink->least = (uint32_t *)inner;
    sink->permutations = (size_t)size / sizeof(uint32_t);
    return result;
}

static PyObject *signature(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *text, *long_hash, *a, *b, *owner = NULL, *result = NULL;
    Py_ssize_t ngram, size;
    Py_buffer factors, offsets;
    if (!PyArg_ParseTuple(args, "UnOOO", &text, &ngram, &long_hash, &a, &b) || check_ngram(ngram) ||
        take(a, &factors, sizeof(uint32_t), PyBUF_SIMPLE))
        return NULL;
    if (take(b, &offsets, sizeof(uint32_t), PyBUF_SIMPLE)) {
        PyBuffer_Release(&factors);
        return NULL;
    }
    Sink *sink = calloc(1, sizeof *sink);
    if (!sink)
        PyErr_NoMemory();
    else if ((result = start_minima(sink, &factors, &offsets))) {
        const uint8_t *bytes = utf8_of(text, &size, &owner);
        if (!bytes || each_shingle(bytes, bytes + size, (size_t)ngram, long_hash, sink))
            Py_CLEAR(result);
        else
            flush(sink);
    }
    free(sink);
    Py_XDECREF(owner);
    PyBuffer_Release(&factors);
    PyBuffer_Release(&offsets);
    return result;
}

static PyObject *minima(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *a, *b, *h, *result = NULL;
    Py_buffer views[3];
    int held = 0;
    Sink *sink = NULL;
    if (!PyArg_ParseTuple(args, "OOO", &h, &a, &b))
        return NULL;
    if (take(h, &views[0], sizeof(uint64_t), PyBUF_SIMPLE))
        goto done;
    held++;
    if (take(a, &views[1], sizeof(uint32_t), PyBUF_SIMPLE))
        goto done;
    held++;
    if (take(b, &views[2], sizeof(uint32_t), PyBUF_SIMPLE))
        goto done;
    held++;
    if (!(sink = calloc(1, sizeof *sink))) {
        PyErr_NoMemory();
        goto done;
    }
    if ((result = start_minima(sink, &views[1], &views[2]))) {
        const uint64_t *hashes = views[0].buf;
        for (size_t i = 0; i < (size_t)views[0].len / sizeof *hashes; i++)
            put(sink, hashes[i]);
        flush(sink);
    }
done:
    free(sink);
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

/* --- pairs ----------------------------------------------------------------------------------------------------- */

static PyObject *common(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *a, *b;
    Py_buffer left, right;
    if (!PyArg_ParseTuple(args, "OO", &a, &b) || take(a, &left, sizeof(uint64_t), PyBUF_SIMPLE))
        return NULL;
    if (take(b, &right, sizeof(uint64_t), PyBUF_SIMPLE)) {
        PyBuffer_Release(&left);
        return NULL;
    }
    const uint64_t *x = left.buf, *y = right.buf;
    const uint64_t *x_end = x + (size_t)left.len / sizeof *x, *y_end = y + (size_t)right.len / sizeof *y;
    size_t count = 0;
    while (x < x_end && y < y_end) {
        uint64_t p = *x, q = *y;
        count += p == q;
        x += p <= q;
        y += q <= p;
    }
    PyBuffer_Release(&left);
    PyBuffer_Release(&right);
    return PyLong_FromSize_t(count);
}

/* Returns the root of x and halves the path to it; -1 if a parent is greater than its child, which is invalid. Only the
   parents on the path are checked, because checking all of them for every piece of pairs would be slow. */
static inline int64_t root_of(uint32_t *parent, uint32_t x) {
    for (uint32_t above; (above = parent[x]) != x; x = parent[x]) {
        if (above > x || parent[above] > above)
            return -1;
        parent[x] = parent[above];
    }
    return x;
}

/* Adds records (earlier, later, similarity) to the union-find `parent`, whose roots are the smallest numbers, and to
   every document's smallest partner. */
static PyObject *unite(PyObject *self, PyObject *args) {
    (void)self;
    PyObject *objects[4], *result = NULL;
    Py_buffer views[4];
    int held = 0;
    if (!PyArg_ParseTuple(args, "OOOO", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    for (; held < 4; held++)
        if (take(objects[held], &views[held], held < 3 ? 4 : 12, held < 3 ? PyBUF_WRITABLE : PyBUF_SIMPLE))
            goto done;
    uint32_t *parent = views[0].buf, *like = views[1].buf;
    float *similarity = views[2].buf;
    size_t documents = (size_t)views[0].len / 4, pairs = (size_t)views[3].len / 12;
    if (views[1].len != views[0].len || views[2].len != views[0].len) {
        PyErr_SetString(PyExc_ValueError, "parent, like and similarity differ in length");
        goto done;
    }
    const uint8_t *record = views[3].buf;
    for (size_t i = 0; i < pairs; i++, record += 12) {
        uint32_t numbers[2];
        float found;
        memcpy(numbers, record, 8);
        memcpy(&found, record + 8, 4);
        if (numbers[0] >= documents || numbers[1] >= documents) {
            PyErr_SetString(PyExc_ValueError, "a pair has a document number beyond the last document");
            goto done;
        }
        for (int side = 0; side < 2; side++) {
            uint32_t document = numbers[side], partner = numbers[1 - side];
            if (partner < like[document]) {
                like[document] = partner;
                similarity[document] = found;
            }
        }
        int64_t a = root_of(parent, numbers[0]), b = root_of(parent, numbers[1]);
        if (a < 0 || b < 0) {
            PyErr_SetString(PyExc_ValueError, "a parent is greater than its child");
            goto done;
        }
        if (a < b)
            parent[b] = (uint32_t)a;
        else
            parent[a] = (uint32_t)b;
    }
    result = Py_NewRef(Py_None);
done:
    while (held)
        PyBuffer_Release(&views[--held]);
    return result;
}

static PyMethodDef methods[] = {
    {"shingles", shingles, METH_VARARGS, "(lower-case text, ngram, hash of long words) -> uint64 shingles as bytes"},
    {"signature", signature, METH_VARARGS, "(text, ngram, hash of long words, factors, offsets) -> uint32 as bytes"},
    {"minima", minima, METH_VARARGS, "(uint64 hashes, factors, offsets) -> uint32 as bytes"},
    {"common", common, METH_VARARGS, "(uint64 ascending, uint64 ascending) -> number of common values"},
    {"unite", unite, METH_VARARGS, "(parent, like, similarity, records): in place"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_minhash", NULL, -1, methods};

PyMODINIT_FUNC PyInit__minhash(void) {
    choose_pass();
    return PyModule_Create(&module);
}
