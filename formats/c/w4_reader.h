/* w4_reader.h - a reader of .w4 containers, versions 1.0 and 1.1, in C99 and nothing else.
 *
 * It follows w4-container.md and w4-codes.md from their text alone, and checks in the order of w4-container 7.6. A file is
 * given as memory (read or mapped), checked, searched and dequantized; weights are used in place. In one source file:
 *
 *     #define W4_IMPLEMENTATION
 *     #include "w4_reader.h"
 *
 * Use:
 *
 *     w4_file file;
 *     int error = w4_open(&file, bytes, nbytes);      // 0, or what is wrong; no weight is read
 *     if (!error) error = w4_verify(&file, NULL);     // optional: every byte is checked
 *     const w4_tensor *t = w4_find(&file, "model.norm.weight");
 *     if (t) w4_row(&file, t, 0, floats);             // t->n_columns floats
 *     w4_close(&file);
 *
 * An error is the number of the clause of w4-container.md that the file breaks, 100 * chapter + clause: 212 is clause 2.12,
 * the digest of the header. W4_NO_MEMORY is the only other one.
 *
 * Memory: w4_open allocates an array of the tensors, one of the blobs and one of 4 bytes a tensor, at most 20 MB together;
 * nothing else allocates, nothing recurses, and less than 4 KB of stack are used.
 * The bytes given must stay as they are until w4_close. No global state; several threads may read one w4_file.
 */
#ifndef W4_READER_H
#define W4_READER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define W4_MAJOR 1
#define W4_MINOR 1
#define W4_NO_MEMORY (-1)
#define W4_MAX_RANK 8

typedef enum {
    W4_INT4, W4_INT4Z, W4_INT4O, W4_NF4, W4_FP4, W4_E2M1, W4_IQ4NL, W4_NL4, W4_NL3, W4_INT8, W4_INT8O, W4_F16, W4_BF16, W4_F32,
    W4_N_SCHEMES
} w4_scheme;
typedef enum {
    W4_CODES, W4_SCALES, W4_SUPER_SCALES, W4_ZERO_POINTS, W4_OFFSETS, W4_SUPER_OFFSETS, W4_VALUES
} w4_kind;
typedef enum { W4_SCALE_F16, W4_SCALE_F32, W4_SCALE_I8, W4_SCALE_S6 } w4_scale; /* I8, S6: a byte, and a super-scale */

#define W4_MAX_PARTS 5

typedef struct {
    w4_kind kind;
    uint64_t offset; /* from the start of the file */
    uint64_t nbytes;
    uint32_t index; /* place among the digests of the trailer */
} w4_part;

typedef struct {
    const char *text; /* as it stands in the index: '"' and '\' have a '\' before them; not terminated */
    uint32_t length;
} w4_name;

typedef struct {
    w4_name name;
    w4_name source_dtype;
    w4_scheme scheme;
    uint32_t group_size; /* 0: the whole row, or no groups */
    w4_scale scale;
    uint32_t rank;
    uint64_t shape[W4_MAX_RANK]; /* outermost axis first */
    uint64_t n_matrices, n_rows, n_columns; /* rank 0 and 1 count as one row */
    uint64_t n_groups; /* of a row */
    uint64_t n_supers; /* super-scales of a row; 0 unless scale is W4_SCALE_I8 or W4_SCALE_S6 */
    uint32_t n_parts;
    w4_part parts[W4_MAX_PARTS];
} w4_tensor;

typedef struct {
    w4_name name;
    uint64_t offset, nbytes; /* from the start of the file */
    uint32_t index;
} w4_blob;

typedef struct {
    const uint8_t *bytes;
    uint64_t nbytes;
    uint64_t index_nbytes, data_offset, data_nbytes;
    uint32_t minor, n_parts, n_sources;
    uint32_t n_blobs, n_tensors;
    w4_blob *blobs;
    w4_tensor *tensors; /* in the order of the file */
    uint32_t *by_name;  /* positions of tensors, sorted by name */
} w4_file;

/* Check everything but the data section (w4-container 7.1). On an error nothing needs to be closed. */
int w4_open(w4_file *file, const void *bytes, uint64_t nbytes);
void w4_close(w4_file *file);

/* Check every part, and all zeros and padding (7.2). part, unless NULL, gets the index of the first that is wrong. */
int w4_verify(const w4_file *file, uint32_t *part);

/* NULL when there is none of that name (UTF-8, zero-terminated). */
const w4_tensor *w4_find(const w4_file *file, const char *name);
const w4_blob *w4_find_blob(const w4_file *file, const char *name);

/* Rows of all matrices of a tensor: w4_row takes 0 to w4_n_rows - 1. */
uint64_t w4_n_rows(const w4_tensor *tensor);

/* Dequantize one row into tensor->n_columns floats (w4-codes 5). Memory-safe on any file that was opened. */
void w4_row(const w4_file *file, const w4_tensor *tensor, uint64_t row, float *out);

/* The 32 bytes that identify the conversion (5.3). */
const uint8_t *w4_conversion_digest(const w4_file *file);

const char *w4_scheme_name(w4_scheme scheme);

#ifdef __cplusplus
}
#endif

#endif /* W4_READER_H */

#ifdef W4_IMPLEMENTATION

#include <stdlib.h>
#include <string.h>

/* ---- w4-container 1: conventions ------------------------------------------------------------------------------- */

#define W4__CLAUSE(chapter, clause) (100 * (chapter) + (clause))

static uint32_t w4__u16(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }

static uint32_t w4__u32(const uint8_t *p) { return w4__u16(p) | w4__u16(p + 2) << 16; }

static uint64_t w4__u64(const uint8_t *p) { return (uint64_t)w4__u32(p) | (uint64_t)w4__u32(p + 4) << 32; }

static uint64_t w4__round_up(uint64_t n, uint64_t alignment) { return (n + alignment - 1) / alignment * alignment; }

static int w4__all_zero(const uint8_t *p, uint64_t n) {
    uint8_t seen = 0;
    uint64_t i;
    for (i = 0; i < n; i++) seen = (uint8_t)(seen | p[i]);
    return seen == 0;
}

/* 1.4: BLAKE3, plain hash mode. Chunks of 1024 bytes are the leaves of a binary tree; `stack` holds the roots of the
 * complete subtrees so far, the largest first. */

typedef struct {
    uint32_t cv[8];         /* of the chunk at work */
    uint8_t block[64];      /* of the chunk at work, not compressed yet */
    uint32_t block_nbytes;  /* bytes in `block` */
    uint32_t n_blocks;      /* of the chunk, already compressed */
    uint64_t n_chunks;      /* before the one at work */
    uint32_t stack[54][8];
    uint32_t depth;
} w4__blake3;

enum { W4__CHUNK_START = 1, W4__CHUNK_END = 2, W4__PARENT = 4, W4__ROOT = 8 };

static const uint32_t w4__iv[8] = {0x6A09E667u, 0xBB67AE85u, 0x3C6EF372u, 0xA54FF53Au,
                                   0x510E527Fu, 0x9B05688Cu, 0x1F83D9ABu, 0x5BE0CD19u};

static uint32_t w4__rotate(uint32_t x, int n) { return x >> n | x << (32 - n); }

#define W4__MIX(a, b, c, d, x, y)         \
    do {                                  \
        v[a] = v[a] + v[b] + (x);         \
        v[d] = w4__rotate(v[d] ^ v[a], 16); \
        v[c] = v[c] + v[d];               \
        v[b] = w4__rotate(v[b] ^ v[c], 12); \
        v[a] = v[a] + v[b] + (y);         \
        v[d] = w4__rotate(v[d] ^ v[a], 8);  \
        v[c] = v[c] + v[d];               \
        v[b] = w4__rotate(v[b] ^ v[c], 7);  \
    } while (0)

static void w4__compress(uint32_t cv[8], const uint8_t block[64], uint32_t nbytes, uint64_t counter, uint32_t flags) {
    static const uint8_t order[7][16] = {
        {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8},
        {3, 4, 10, 12, 13, 2, 7, 14, 6, 5, 9, 0, 11, 15, 8, 1}, {10, 7, 12, 9, 14, 3, 13, 15, 4, 0, 11, 2, 5, 8, 1, 6},
        {12, 13, 9, 11, 15, 10, 14, 8, 7, 2, 5, 3, 0, 1, 6, 4}, {9, 14, 11, 5, 8, 12, 15, 1, 13, 3, 0, 10, 2, 6, 4, 7},
        {11, 15, 5, 0, 1, 9, 8, 6, 14, 10, 2, 12, 3, 4, 7, 13}};
    uint32_t v[16], m[16];
    int i, round;
    for (i = 0; i < 16; i++) m[i] = w4__u32(block + 4 * i);
    for (i = 0; i < 8; i++) v[i] = cv[i];
    for (i = 0; i < 4; i++) v[8 + i] = w4__iv[i];
    v[12] = (uint32_t)(counter & 0xFFFFFFFFu);
    v[13] = (uint32_t)(counter >> 32);
    v[14] = nbytes;
    v[15] = flags;
    for (round = 0; round < 7; round++) {
        const uint8_t *o = order[round];
        W4__MIX(0, 4, 8, 12, m[o[0]], m[o[1]]);
        W4__MIX(1, 5, 9, 13, m[o[2]], m[o[3]]);
        W4__MIX(2, 6, 10, 14, m[o[4]], m[o[5]]);
        W4__MIX(3, 7, 11, 15, m[o[6]], m[o[7]]);
        W4__MIX(0, 5, 10, 15, m[o[8]], m[o[9]]);
        W4__MIX(1, 6, 11, 12, m[o[10]], m[o[11]]);
        W4__MIX(2, 7, 8, 13, m[o[12]], m[o[13]]);
        W4__MIX(3, 4, 9, 14, m[o[14]], m[o[15]]);
    }
    for (i = 0; i < 8; i++) cv[i] = v[i] ^ v[i + 8];
}

static void w4__blake3_init(w4__blake3 *h) {
    memcpy(h->cv, w4__iv, sizeof h->cv);
    h->block_nbytes = h->n_blocks = h->depth = 0;
    h->n_chunks = 0;
}

static void w4__parent(uint32_t left[8], const uint32_t right[8], uint32_t flags) {
    uint8_t block[64];
    int i, k;
    for (i = 0; i < 8; i++)
        for (k = 0; k < 4; k++) {
            block[4 * i + k] = (uint8_t)(left[i] >> 8 * k);
            block[32 + 4 * i + k] = (uint8_t)(right[i] >> 8 * k);
        }
    memcpy(left, w4__iv, sizeof w4__iv);
    w4__compress(left, block, 64, 0, W4__PARENT | flags);
}

static uint32_t w4__start_flag(const w4__blake3 *h) { return h->n_blocks == 0 ? (uint32_t)W4__CHUNK_START : 0u; }

static void w4__blake3_update(w4__blake3 *h, const uint8_t *p, uint64_t n) {
    while (n) {
        uint32_t take;
        if (h->block_nbytes == 64) { /* more follows, so the block is not the last */
            uint32_t flags = w4__start_flag(h) | (h->n_blocks == 15 ? (uint32_t)W4__CHUNK_END : 0u);
            w4__compress(h->cv, h->block, 64, h->n_chunks, flags);
            h->block_nbytes = 0;
            if (++h->n_blocks == 16) {
                uint64_t merged = ++h->n_chunks;
                for (; (merged & 1) == 0; merged >>= 1) {
                    h->depth--;
                    w4__parent(h->stack[h->depth], h->cv, 0);
                    memcpy(h->cv, h->stack[h->depth], sizeof h->cv);
                }
                memcpy(h->stack[h->depth++], h->cv, sizeof h->cv);
                memcpy(h->cv, w4__iv, sizeof h->cv);
                h->n_blocks = 0;
            }
        }
        take = 64 - h->block_nbytes;
        if (take > n) take = (uint32_t)n;
        memcpy(h->block + h->block_nbytes, p, take);
        h->block_nbytes += take;
        p += take;
        n -= take;
    }
}

static void w4__blake3_final(w4__blake3 *h, uint8_t out[32]) {
    uint32_t flags = w4__start_flag(h) | W4__CHUNK_END | (h->depth ? 0u : (uint32_t)W4__ROOT);
    int i, k;
    memset(h->block + h->block_nbytes, 0, 64 - h->block_nbytes);
    w4__compress(h->cv, h->block, h->block_nbytes, h->n_chunks, flags);
    while (h->depth) {
        h->depth--;
        w4__parent(h->stack[h->depth], h->cv, h->depth ? 0u : (uint32_t)W4__ROOT);
        memcpy(h->cv, h->stack[h->depth], sizeof h->cv);
    }
    for (i = 0; i < 8; i++)
        for (k = 0; k < 4; k++) out[4 * i + k] = (uint8_t)(h->cv[i] >> 8 * k);
}

static int w4__digest_is(const uint8_t *p, uint64_t n, const uint8_t expected[32]) {
    w4__blake3 h;
    uint8_t found[32];
    w4__blake3_init(&h);
    w4__blake3_update(&h, p, n);
    w4__blake3_final(&h, found);
    return memcmp(found, expected, 32) == 0;
}

/* ---- w4-container 2: header ------------------------------------------------------------------------------------ */

static int w4__header(w4_file *f) {
    static const uint8_t signature[8] = {0x89, 0x57, 0x34, 0x43, 0x0D, 0x0A, 0x1A, 0x0A};
    const uint8_t *p = f->bytes;
    if (f->nbytes < 8 || memcmp(p, signature, 8) != 0) return W4__CLAUSE(2, 2);
    if (f->nbytes < 128) return W4__CLAUSE(2, 1);
    if (w4__u16(p + 8) != W4_MAJOR || w4__u16(p + 10) > W4_MINOR) return W4__CLAUSE(2, 3);
    if (!w4__digest_is(p, 96, p + 96)) return W4__CLAUSE(2, 12);
    if (w4__u32(p + 12) != 128) return W4__CLAUSE(2, 4);
    f->minor = w4__u16(p + 10);
    f->index_nbytes = w4__u64(p + 24);
    f->data_offset = w4__u64(p + 32);
    f->data_nbytes = w4__u64(p + 40);
    f->n_parts = w4__u32(p + 48);
    f->n_sources = w4__u32(p + 52);
    if (f->index_nbytes < 2 || f->index_nbytes > (uint64_t)1 << 25) return W4__CLAUSE(2, 6);
    if (f->data_offset != w4__round_up(128 + f->index_nbytes, 4096)) return W4__CLAUSE(2, 7);
    if (f->data_nbytes % 64 || f->data_nbytes >= (uint64_t)1 << 53) return W4__CLAUSE(2, 8);
    if (f->n_parts > (uint32_t)1 << 18 || f->n_sources > (uint32_t)1 << 16) return W4__CLAUSE(2, 9);
    if (w4__u64(p + 56) != 0) return W4__CLAUSE(2, 10);
    if (w4__u64(p + 16) != f->data_offset + f->data_nbytes + 32 * ((uint64_t)f->n_parts + f->n_sources + 1))
        return W4__CLAUSE(2, 5);
    if (w4__u64(p + 16) != f->nbytes) return W4__CLAUSE(2, 5);
    if (!w4__digest_is(p + 128, f->index_nbytes, p + 64)) return W4__CLAUSE(2, 11);
    return 0;
}

/* ---- w4-container 3: index ------------------------------------------------------------------------------------- */

/* 3.1, 3.2: one pass that accepts canonical JSON and nothing else. Later passes rely on it and cannot run astray. */

#define W4__MAX_DEPTH 64

typedef struct {
    const uint8_t *at, *end;
} w4__text;

static int w4__string(w4__text *t) { /* at its opening quote; moves past its closing one */
    t->at++;
    while (t->at < t->end && *t->at != '"') {
        uint8_t c = *t->at;
        uint64_t left = (uint64_t)(t->end - t->at);
        if (c < 0x20) return 0;
        if (c == '\\') {
            if (left < 2) return 0;
            if (t->at[1] == 'u') { /* only where there is no shorter way */
                uint8_t tens, ones;
                if (left < 6 || t->at[2] != '0' || t->at[3] != '0') return 0;
                tens = t->at[4];
                ones = t->at[5];
                if (tens != '0' && tens != '1') return 0;
                if (!((ones >= '0' && ones <= '9') || (ones >= 'a' && ones <= 'f'))) return 0;
                if (tens == '0' && (ones == '8' || ones == '9' || ones == 'a' || ones == 'c' || ones == 'd')) return 0;
                t->at += 6;
            } else {
                if (!memchr("\"\\bfnrt", t->at[1], 7)) return 0;
                t->at += 2;
            }
        } else if (c < 0x80) {
            t->at++;
        } else { /* UTF-8: shortest form, no surrogates, up to U+10FFFF */
            uint32_t n = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2, i;
            if (c < 0xC2 || c > 0xF4 || left < n) return 0;
            for (i = 1; i < n; i++)
                if ((t->at[i] & 0xC0) != 0x80) return 0;
            if (c == 0xE0 && t->at[1] < 0xA0) return 0;
            if (c == 0xED && t->at[1] > 0x9F) return 0;
            if (c == 0xF0 && t->at[1] < 0x90) return 0;
            if (c == 0xF4 && t->at[1] > 0x8F) return 0;
            t->at += n;
        }
    }
    if (t->at >= t->end) return 0;
    t->at++;
    return 1;
}

static int w4__number(w4__text *t) {
    uint64_t value = 0;
    int negative = *t->at == '-', n = 0;
    t->at += negative;
    for (; t->at < t->end && *t->at >= '0' && *t->at <= '9'; t->at++, n++) {
        if (n == 16) return 0;
        value = 10 * value + (uint64_t)(*t->at - '0');
    }
    if (n == 0 || value >= (uint64_t)1 << 53) return 0;
    if (t->at[-n] == '0' && (n > 1 || negative)) return 0;
    return 1;
}

static int w4__word(w4__text *t, const char *word) {
    size_t n = strlen(word);
    if ((uint64_t)(t->end - t->at) < n || memcmp(t->at, word, n) != 0) return 0;
    t->at += n;
    return 1;
}

/* Order of two strings of the text by code points, which is that of their UTF-8. a and b are at opening quotes, and both
 * strings were found sound. An escape below U+0020 sorts as the character that it stands for. */
static uint32_t w4__character(const uint8_t **at) {
    const uint8_t *p = *at;
    static const char letters[] = "\bb\ff\nn\rr\tt";
    size_t i;
    if (*p != '\\') {
        (*at)++;
        return *p;
    }
    if (p[1] == 'u') {
        *at += 6;
        return (uint32_t)(p[4] - '0') * 16 + (uint32_t)(p[5] <= '9' ? p[5] - '0' : p[5] - 'a' + 10);
    }
    *at += 2;
    for (i = 0; i + 1 < sizeof letters; i += 2)
        if ((uint8_t)letters[i + 1] == p[1]) return (uint8_t)letters[i];
    return p[1];
}

static int w4__compare_strings(const uint8_t *a, const uint8_t *b) {
    a++;
    b++;
    while (*a != '"' && *b != '"') {
        uint32_t x = w4__character(&a), y = w4__character(&b);
        if (x != y) return x < y ? -1 : 1;
    }
    return *a != '"' ? 1 : *b != '"' ? -1 : 0;
}

static int w4__capped(const uint8_t *text, uint64_t nbytes) { /* 3.2, whatever the bytes are */
    uint32_t marks = 0;
    int32_t depth = 0;
    uint64_t i;
    int in_string = 0, escaped = 0;
    for (i = 0; i < nbytes; i++) {
        uint8_t c = text[i];
        int opens = c == '[' || c == '{';
        marks += (uint32_t)(opens || c == ',');
        if (c == '"' && !escaped) in_string = !in_string;
        if (!in_string) depth += opens - (c == ']' || c == '}');
        if (marks > (uint32_t)1 << 22 || depth > W4__MAX_DEPTH) return 0;
        escaped = c == '\\' && !escaped;
    }
    return 1;
}

static int w4__canonical(const uint8_t *text, uint64_t nbytes) {
    w4__text t;
    uint8_t is_object[W4__MAX_DEPTH];
    const uint8_t *key[W4__MAX_DEPTH]; /* the last key of each open object, or NULL */
    uint32_t depth = 0; /* as counted above: what was read so far is sound */
    int after_value = 0; /* a value has just ended */
    if (!w4__capped(text, nbytes)) return W4__CLAUSE(3, 2);
    t.at = text;
    t.end = text + nbytes;
    for (;;) {
        uint8_t close = depth && is_object[depth - 1] ? '}' : ']', c;
        int opened = 0;
        if (after_value) {
            if (depth == 0) return t.at == t.end ? 0 : W4__CLAUSE(3, 1);
            if (t.at == t.end) return W4__CLAUSE(3, 1);
            if (*t.at == close) {
                t.at++;
                depth--;
                continue;
            }
            if (*t.at != ',') return W4__CLAUSE(3, 1);
            t.at++;
        } else if (depth) { /* just opened */
            if (t.at == t.end) return W4__CLAUSE(3, 1);
            if (*t.at == close) {
                t.at++;
                depth--;
                after_value = 1;
                continue;
            }
        }
        if (depth && is_object[depth - 1]) {
            const uint8_t *start = t.at;
            if (t.at == t.end || *t.at != '"' || !w4__string(&t)) return W4__CLAUSE(3, 1);
            if (key[depth - 1] && w4__compare_strings(key[depth - 1], start) >= 0) return W4__CLAUSE(3, 1);
            key[depth - 1] = start;
            if (t.at == t.end || *t.at++ != ':') return W4__CLAUSE(3, 1);
        }
        if (t.at == t.end) return W4__CLAUSE(3, 1);
        c = *t.at;
        if (c == '{' || c == '[') {
            is_object[depth] = c == '{';
            key[depth] = NULL;
            depth++;
            t.at++;
            opened = 1;
        } else if (c == '"') {
            if (!w4__string(&t)) return W4__CLAUSE(3, 1);
        } else if (c == '-' || (c >= '0' && c <= '9')) {
            if (!w4__number(&t)) return W4__CLAUSE(3, 1);
        } else if (!w4__word(&t, "true") && !w4__word(&t, "false")) {
            return W4__CLAUSE(3, 1);
        }
        after_value = !opened;
    }
}

/* Walking what was found canonical. A value is a pointer to its first byte. */

static const uint8_t *w4__skip(const uint8_t *p) { /* past a value */
    uint32_t depth = 0;
    do {
        if (*p == '"') {
            for (p++; *p != '"'; p++) p += *p == '\\';
            p++;
        } else if (*p == '{' || *p == '[') {
            depth++;
            p++;
            continue;
        } else if (*p == '}' || *p == ']') {
            depth--;
            p++;
        } else if (*p == ',' || *p == ':') {
            p++;
            continue;
        } else {
            while ((*p >= '0' && *p <= '9') || *p == '-' || (*p >= 'a' && *p <= 'z')) p++;
        }
    } while (depth);
    return p;
}

/* The next element of an array, or the next key of an object; NULL at the end. Start with what opens it. */
static const uint8_t *w4__first(const uint8_t *open) { return open[1] == ']' || open[1] == '}' ? NULL : open + 1; }

static const uint8_t *w4__next(const uint8_t *element) {
    const uint8_t *p = w4__skip(element);
    return *p == ',' ? p + 1 : NULL;
}

static const uint8_t *w4__next_key(const uint8_t *key) { return w4__next(w4__skip(key) + 1); }

static uint32_t w4__count(const uint8_t *array) {
    uint32_t n = 0;
    const uint8_t *p;
    for (p = w4__first(array); p; p = w4__next(p)) n++;
    return n;
}

/* The values of `keys` (sorted) of an object, NULL for those it has not; 0 when it is no object or has another key. */
static int w4__members(const uint8_t *object, const char *const *keys, uint32_t n, const uint8_t **values) {
    const uint8_t *key;
    int sound = 1;
    uint32_t i;
    for (i = 0; i < n; i++) values[i] = NULL;
    if (!object || *object != '{') return 0;
    for (key = w4__first(object); key; key = w4__next_key(key)) {
        const uint8_t *after = w4__skip(key);
        size_t length = (size_t)(after - key) - 2;
        for (i = 0; i < n; i++)
            if (strlen(keys[i]) == length && memcmp(keys[i], key + 1, length) == 0) break;
        if (i == n)
            sound = 0;
        else
            values[i] = after + 1;
    }
    return sound;
}

static int w4__exactly(const uint8_t *object, const char *const *keys, uint32_t n, const uint8_t **values) {
    uint32_t i;
    if (!w4__members(object, keys, n, values)) return 0;
    for (i = 0; i < n; i++)
        if (!values[i]) return 0;
    return 1;
}

static int w4__integer(const uint8_t *p, uint64_t at_most, uint64_t *out) {
    uint64_t value = 0;
    if (!p || *p < '0' || *p > '9') return 0;
    for (; *p >= '0' && *p <= '9'; p++) value = 10 * value + (uint64_t)(*p - '0');
    *out = value;
    return value <= at_most;
}

static int w4__is(const uint8_t *p, const char *word) {
    size_t n = strlen(word);
    return p && *p == '"' && (size_t)(w4__skip(p) - p) == n + 2 && memcmp(p + 1, word, n) == 0;
}

/* 3.6: 1 to 512 bytes, no control characters. `forbidden`: one more character that must not occur, or 0. */
static int w4__name(const uint8_t *p, uint8_t forbidden, w4_name *out) {
    uint32_t n = 0;
    const uint8_t *start;
    if (!p || *p != '"') return 0;
    start = ++p;
    for (; *p != '"'; p++, n++) {
        if (*p == '\\') {
            p++;
            if (*p != '"' && *p != '\\') return 0; /* stands for a character below U+0020 */
        }
        if (*p == 0x7F || (forbidden && *p == forbidden) || n == 512) return 0;
    }
    out->text = (const char *)start;
    out->length = (uint32_t)(p - start);
    return n > 0;
}

static int w4__is_word_byte(char c, const char *more) {
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || (c && strchr(more, c));
}

static int w4__words(const w4_name *name, uint32_t at_most, const char *more) {
    uint32_t i;
    for (i = 0; i < name->length; i++)
        if (!w4__is_word_byte(name->text[i], more)) return 0;
    return name->length <= at_most;
}

typedef struct {
    w4_file *file;
    uint64_t end;     /* of the last part, from the start of the data section */
    uint32_t n_parts; /* so far */
} w4__walk;

/* 4.2: where the next part lies. */
static int w4__place(w4__walk *w, const uint8_t *offset, uint64_t nbytes, uint64_t *start) {
    uint64_t at;
    if (!w4__integer(offset, ((uint64_t)1 << 53) - 1, &at)) return W4__CLAUSE(4, 2);
    if (at != w4__round_up(w->end, 64)) return W4__CLAUSE(4, 2);
    if (at + nbytes > w->file->data_nbytes) return W4__CLAUSE(4, 4);
    *start = w->file->data_offset + at;
    w->end = at + nbytes;
    w->n_parts++;
    return 0;
}

static int w4__blobs(w4__walk *w, const uint8_t *array) { /* 3.4 */
    static const char *const keys[] = {"name", "nbytes", "offset"};
    const uint64_t cap = (uint64_t)1 << 28;
    const uint8_t *p, *values[3];
    uint64_t total = 0;
    uint32_t n;
    if (*array != '[' || (n = w4__count(array)) > 1024) return W4__CLAUSE(3, 4);
    w->file->blobs = (w4_blob *)calloc(n ? n : 1, sizeof(w4_blob));
    if (!w->file->blobs) return W4_NO_MEMORY;
    for (p = w4__first(array); p; p = w4__next(p)) {
        w4_blob *blob = &w->file->blobs[w->file->n_blobs];
        uint32_t i;
        int error;
        if (!w4__exactly(p, keys, 3, values) || !w4__name(values[0], 0, &blob->name)) return W4__CLAUSE(3, 4);
        if (!w4__words(&blob->name, 512, "._-") || blob->name.text[0] == '.') return W4__CLAUSE(3, 4);
        for (i = 0; i < w->file->n_blobs; i++) {
            const w4_name *other = &w->file->blobs[i].name;
            if (other->length == blob->name.length && memcmp(other->text, blob->name.text, other->length) == 0)
                return W4__CLAUSE(3, 4);
        }
        if (!w4__integer(values[1], cap, &blob->nbytes)) return W4__CLAUSE(3, 4);
        total += blob->nbytes;
        if (total > cap) return W4__CLAUSE(3, 4);
        blob->index = w->n_parts;
        error = w4__place(w, values[2], blob->nbytes, &blob->offset);
        if (error) return error;
        w->file->n_blobs++;
    }
    return 0;
}

static int w4__provenance(const w4_file *f, const uint8_t *object) { /* 3.5 */
    static const char *const keys[] = {"source", "tool"}, *const source_keys[] = {"files", "kind"},
                             *const file_keys[] = {"name", "nbytes"};
    const uint8_t *members[2], *source[2], *file[2], *p;
    uint64_t nbytes;
    uint32_t n = 0;
    w4_name name;
    (void)w4__members(object, keys, 2, members); /* other keys may follow */
    if (*object != '{' || !members[1] || *members[1] != '"') return W4__CLAUSE(3, 5);
    if (!w4__exactly(members[0], source_keys, 2, source) || *source[1] != '"') return W4__CLAUSE(3, 5);
    if (*source[0] != '[') return W4__CLAUSE(3, 5);
    for (p = w4__first(source[0]); p; p = w4__next(p), n++) {
        if (!w4__exactly(p, file_keys, 2, file) || !w4__name(file[0], '/', &name)) return W4__CLAUSE(3, 5);
        if (!w4__integer(file[1], ((uint64_t)1 << 53) - 1, &nbytes)) return W4__CLAUSE(3, 5);
    }
    return n == f->n_sources ? 0 : W4__CLAUSE(3, 5);
}

/* w4-codes 2: schemes. */

static const char *const w4__scheme_names[W4_N_SCHEMES] = {"int4",  "int4z", "int4o", "nf4", "fp4",  "e2m1",
                                                           "iq4nl", "nl4",   "nl3",   "int8", "int8o", "f16", "bf16", "f32"};
static const uint32_t w4__bits[W4_N_SCHEMES] = {4, 4, 4, 4, 4, 4, 4, 4, 3, 8, 8, 16, 16, 32};

const char *w4_scheme_name(w4_scheme scheme) { return w4__scheme_names[scheme]; }

static int w4__is_float(w4_scheme scheme) { return scheme >= W4_F16; }

static int w4__has_shifts(w4_scheme scheme) { return scheme == W4_NL4 || scheme == W4_NL3; }

static int w4__has_offsets(w4_scheme scheme) { return scheme == W4_INT4O || scheme == W4_INT8O; }

/* 2.3 */
static const uint32_t w4__nf4[16] = {0xbf800000u, 0xbf3239b1u, 0xbf066b30u, 0xbeca32a0u, 0xbe91a24du, 0xbe3d353fu,
                                     0xbdba7871u, 0x00000000u, 0x3da2faffu, 0x3e24cae3u, 0x3e7c04ddu, 0x3ead033au,
                                     0x3ee1a4b8u, 0x3f1007abu, 0x3f3913b3u, 0x3f800000u};
static const uint32_t w4__fp4[16] = {0x00000000u, 0x3baaaaabu, 0x3f2aaaabu, 0x3f800000u, 0x3eaaaaabu, 0x3f000000u,
                                     0x3e2aaaabu, 0x3e800000u, 0x80000000u, 0xbbaaaaabu, 0xbf2aaaabu, 0xbf800000u,
                                     0xbeaaaaabu, 0xbf000000u, 0xbe2aaaabu, 0xbe800000u};
static const uint32_t w4__e2m1[16] = {0x00000000u, 0x3f000000u, 0x3f800000u, 0x3fc00000u, 0x40000000u, 0x40400000u,
                                      0x40800000u, 0x40c00000u, 0x80000000u, 0xbf000000u, 0xbf800000u, 0xbfc00000u,
                                      0xc0000000u, 0xc0400000u, 0xc0800000u, 0xc0c00000u};
static const uint32_t w4__iq4nl[16] = {0xc2fe0000u, 0xc2d00000u, 0xc2a60000u, 0xc2820000u, 0xc2440000u, 0xc20c0000u,
                                       0xc1b00000u, 0xc1200000u, 0x3f800000u, 0x41500000u, 0x41c80000u, 0x42180000u,
                                       0x42540000u, 0x428a0000u, 0x42b20000u, 0x42e20000u};

static const uint32_t w4__nl3[8] = {0xc2fe0000u, 0xc2900000u, 0xc2200000u, 0xc1500000u,
                                    0x41300000u, 0x42080000u, 0x42800000u, 0x42ce0000u};

static const uint32_t *w4__codebook(w4_scheme scheme) { /* 2^bits entries, or NULL */
    if (scheme == W4_NL3) return w4__nl3;
    if (scheme == W4_IQ4NL || scheme == W4_NL4) return w4__iq4nl;
    return scheme == W4_NF4 ? w4__nf4 : scheme == W4_FP4 ? w4__fp4 : scheme == W4_E2M1 ? w4__e2m1 : NULL;
}

enum { W4__CODEBOOK, W4__GROUP_SIZE, W4__NAME, W4__PARTS, W4__SCALE_DTYPE, W4__SCHEME, W4__SHAPE, W4__SOURCE_DTYPE };

static int w4__is_two_level(const w4_tensor *t) { return t->scale == W4_SCALE_I8 || t->scale == W4_SCALE_S6; }

static int w4__scheme(w4_tensor *t, const uint8_t *const *values, uint32_t minor) { /* 3.7 */
    static const char *const scales[] = {"f16", "f32", "i8", "s6"};
    uint64_t group_size;
    const uint32_t *table;
    int scheme = 0, scale = 0;
    while (scheme < W4_N_SCHEMES && !w4__is(values[W4__SCHEME], w4__scheme_names[scheme])) scheme++;
    if (scheme == W4_N_SCHEMES) return 0;
    t->scheme = (w4_scheme)scheme;
    if (w4__is_float(t->scheme)) return 1;
    while (scale < 4 && !w4__is(values[W4__SCALE_DTYPE], scales[scale])) scale++;
    if (scale == 4) return 0;
    t->scale = (w4_scale)scale;
    if (w4__has_shifts(t->scheme) != (t->scale == W4_SCALE_S6)) return 0; /* w4-codes 2.1, 2.6 */
    if (!w4__integer(values[W4__GROUP_SIZE], 256, &group_size)) return 0;
    if (group_size != 0 && (group_size < 16 || (group_size & (group_size - 1)))) return 0;
    t->group_size = (uint32_t)group_size;
    if (w4__is_two_level(t) && (group_size == 0 || group_size == 256)) return 0; /* w4-codes 2.5, 2.6 */
    if (minor < 1 && (w4__is_two_level(t) || group_size == 16 || scheme == W4_IQ4NL || scheme == W4_INT8O)) return 0;
    table = w4__codebook(t->scheme);
    if (table) {
        const uint8_t *entry = values[W4__CODEBOOK];
        int i, digit;
        if (!entry || *entry != '[' || w4__count(entry) != (uint32_t)1 << w4__bits[scheme]) return 0;
        for (i = 0, entry = w4__first(entry); entry; i++, entry = w4__next(entry)) {
            if (*entry != '"' || w4__skip(entry) - entry != 10) return 0;
            for (digit = 0; digit < 8; digit++)
                if (entry[1 + digit] != (uint8_t) "0123456789abcdef"[table[i] >> (28 - 4 * digit) & 15]) return 0;
        }
    }
    return 1;
}

static int w4__shape(w4_tensor *t, const uint8_t *array) { /* 3.8; w4-codes 1.1 */
    const uint64_t cap = (uint64_t)1 << 48;
    uint64_t product = 1;
    const uint8_t *p;
    uint32_t i;
    if (*array != '[' || w4__count(array) > W4_MAX_RANK) return 0;
    for (p = w4__first(array); p; p = w4__next(p))
        if (!w4__integer(p, 0xFFFFFFFFu, &t->shape[t->rank++])) return 0;
    for (i = 0; i < t->rank; i++) {
        uint64_t dim = t->shape[i] ? t->shape[i] : 1;
        if (product > cap / dim) return 0;
        product *= dim;
    }
    t->n_matrices = t->n_rows = t->n_columns = 1;
    if (t->rank > 0) t->n_columns = t->shape[t->rank - 1];
    if (t->rank > 1) t->n_rows = t->shape[t->rank - 2];
    for (i = 0; i + 2 < t->rank; i++) t->n_matrices *= t->shape[i];
    if (!w4__is_float(t->scheme) && t->n_columns)
        t->n_groups = t->group_size ? (t->n_columns + t->group_size - 1) / t->group_size : 1;
    if (t->scale == W4_SCALE_I8) t->n_supers = (t->n_columns + 255) / 256;
    if (t->scale == W4_SCALE_S6) t->n_supers = t->n_columns > 0;
    return 1;
}

static uint64_t w4__n_tiles(const w4_tensor *t) { return (t->n_rows + 15) / 16; }

static uint64_t w4__n_lines(const w4_tensor *t) { /* w4-codes 3.2 */
    uint64_t per_dword = 32 / w4__bits[t->scheme];
    if (w4__bits[t->scheme] == 3) return (t->n_columns + 31) / 32 * 3;
    return (t->n_columns + per_dword - 1) / per_dword;
}

static int w4__is_super(w4_kind kind) { return kind == W4_SUPER_SCALES || kind == W4_SUPER_OFFSETS; }

/* w4-codes 3.4, of a part behind the codes: bytes of a number, and numbers of a row. */
static uint32_t w4__width(const w4_tensor *t, w4_kind kind) {
    if (kind == W4_ZERO_POINTS) return 1;
    if (w4__is_super(kind) || t->scale == W4_SCALE_F16) return 2;
    return t->scale == W4_SCALE_F32 ? 4 : 1;
}

static uint64_t w4__n_runs(const w4_tensor *t, w4_kind kind) { return w4__is_super(kind) ? t->n_supers : t->n_groups; }

/* w4-codes 4.1 */
static uint32_t w4__part_sizes(const w4_tensor *t, w4_kind kinds[W4_MAX_PARTS], uint64_t sizes[W4_MAX_PARTS]) {
    uint64_t tiled = t->n_matrices * w4__n_tiles(t) * w4__n_lines(t) * 64;
    uint32_t n = 1, i;
    kinds[0] = w4__is_float(t->scheme) ? W4_VALUES : W4_CODES;
    sizes[0] = t->rank < 2 ? t->n_columns * (w4__bits[t->scheme] / 8) : tiled;
    if (w4__is_float(t->scheme)) return 1;
    kinds[n++] = W4_SCALES;
    if (w4__is_two_level(t)) kinds[n++] = W4_SUPER_SCALES;
    if (t->scheme == W4_INT4Z) kinds[n++] = W4_ZERO_POINTS;
    if (w4__has_offsets(t->scheme)) kinds[n++] = W4_OFFSETS;
    if (w4__has_offsets(t->scheme) && t->scale == W4_SCALE_I8) kinds[n++] = W4_SUPER_OFFSETS;
    for (i = 1; i < n; i++)
        sizes[i] = t->n_matrices * w4__n_tiles(t) * w4__n_runs(t, kinds[i]) * 16 * w4__width(t, kinds[i]);
    return n;
}

static int w4__parts(w4__walk *w, w4_tensor *t, const uint8_t *array) { /* 3.9 */
    static const char *const keys[] = {"kind", "nbytes", "offset"},
                             *const names[] = {"codes",   "scales",        "super_scales", "zero_points",
                                               "offsets", "super_offsets", "values"};
    const uint8_t *p, *values[3];
    w4_kind kinds[W4_MAX_PARTS];
    uint64_t sizes[W4_MAX_PARTS], nbytes;
    uint32_t n = w4__part_sizes(t, kinds, sizes);
    if (t->rank < 2 && !w4__is_float(t->scheme)) return W4__CLAUSE(3, 9); /* w4-codes 2.4 */
    if (*array != '[' || w4__count(array) != n) return W4__CLAUSE(3, 9);
    for (p = w4__first(array); p; p = w4__next(p)) {
        w4_part *part = &t->parts[t->n_parts];
        int error;
        part->kind = kinds[t->n_parts];
        part->nbytes = sizes[t->n_parts];
        part->index = w->n_parts;
        if (!w4__exactly(p, keys, 3, values) || !w4__is(values[0], names[part->kind])) return W4__CLAUSE(3, 9);
        if (!w4__integer(values[1], ((uint64_t)1 << 53) - 1, &nbytes) || nbytes != part->nbytes)
            return W4__CLAUSE(3, 9);
        error = w4__place(w, values[2], nbytes, &part->offset);
        if (error) return error;
        t->n_parts++;
    }
    return 0;
}

static int w4__tensor(w4__walk *w, w4_tensor *t, const uint8_t *object) { /* 3.6 */
    static const char *const keys[] = {"codebook",    "group_size", "name",  "parts",
                                       "scale_dtype", "scheme",     "shape", "source_dtype"};
    const uint8_t *v[8];
    int known = w4__members(object, keys, 8, v), has_groups, has_codebook;
    if (*object != '{' || !w4__name(v[W4__NAME], 0, &t->name)) return W4__CLAUSE(3, 6);
    if (!w4__scheme(t, v, w->file->minor)) return W4__CLAUSE(3, 7);
    has_groups = !w4__is_float(t->scheme);
    has_codebook = w4__codebook(t->scheme) != NULL;
    if (!known || !v[W4__PARTS] || !v[W4__SHAPE] || !v[W4__SOURCE_DTYPE]) return W4__CLAUSE(3, 6);
    if (!has_groups && (v[W4__GROUP_SIZE] || v[W4__SCALE_DTYPE])) return W4__CLAUSE(3, 6);
    if (!has_codebook && v[W4__CODEBOOK]) return W4__CLAUSE(3, 6);
    if (!w4__name(v[W4__SOURCE_DTYPE], 0, &t->source_dtype)) return W4__CLAUSE(3, 6);
    if (!w4__words(&t->source_dtype, 32, "_")) return W4__CLAUSE(3, 6);
    if (!w4__shape(t, v[W4__SHAPE])) return W4__CLAUSE(3, 8);
    return w4__parts(w, t, v[W4__PARTS]);
}

/* Order of a name of the index and another, or a plain string of n bytes. In a name a '\' only ever stands before '"' or
 * '\', so that its characters are what follows the backslashes. */
static int w4__compare_names(const w4_name *a, const char *b, size_t b_length, int b_is_plain) {
    size_t i = 0, k = 0;
    while (i < a->length && k < b_length) {
        uint8_t x, y;
        if (a->text[i] == '\\') i++;
        if (!b_is_plain && b[k] == '\\') k++;
        x = (uint8_t)a->text[i++];
        y = (uint8_t)b[k++];
        if (x != y) return x < y ? -1 : 1;
    }
    return i < a->length ? 1 : k < b_length ? -1 : 0;
}

static int w4__compare_at(const w4_file *f, uint32_t i, uint32_t k) {
    const w4_name *a = &f->tensors[i].name, *b = &f->tensors[k].name;
    return w4__compare_names(a, b->text, b->length, 0);
}

static void w4__sift(const w4_file *f, uint32_t *heap, uint32_t root, uint32_t n) {
    for (;;) {
        uint32_t child = 2 * root + 1, swap;
        if (child >= n) return;
        if (child + 1 < n && w4__compare_at(f, heap[child], heap[child + 1]) < 0) child++;
        if (w4__compare_at(f, heap[root], heap[child]) >= 0) return;
        swap = heap[root];
        heap[root] = heap[child];
        heap[child] = swap;
        root = child;
    }
}

static void w4__sort_names(w4_file *f) { /* heap sort: n log n steps on hostile names too */
    uint32_t i, swap, *heap = f->by_name;
    for (i = 0; i < f->n_tensors; i++) heap[i] = i;
    for (i = f->n_tensors / 2; i-- > 0;) w4__sift(f, heap, i, f->n_tensors);
    for (i = f->n_tensors; i-- > 1;) {
        swap = heap[0];
        heap[0] = heap[i];
        heap[i] = swap;
        w4__sift(f, heap, 0, i);
    }
}

static int w4__tensors(w4__walk *w, const uint8_t *array) {
    w4_file *f = w->file;
    const uint8_t *p;
    uint32_t n, i;
    int error = 0;
    if (*array != '[' || (n = w4__count(array)) > 65536) return W4__CLAUSE(3, 6);
    f->tensors = (w4_tensor *)calloc(n ? n : 1, sizeof(w4_tensor));
    f->by_name = (uint32_t *)calloc(n ? n : 1, sizeof(uint32_t));
    if (!f->tensors || !f->by_name) return W4_NO_MEMORY;
    for (p = w4__first(array); p && !error; p = w4__next(p)) {
        w4_tensor *t = &f->tensors[f->n_tensors];
        error = w4__tensor(w, t, p);
        f->n_tensors += t->name.length > 0;
    }
    /* A name that was taken comes before whatever else is wrong with its tensor, so before any error found by now. */
    w4__sort_names(f);
    for (i = 1; i < f->n_tensors; i++)
        if (w4__compare_at(f, f->by_name[i - 1], f->by_name[i]) == 0) return W4__CLAUSE(3, 6);
    return error;
}

static int w4__index(w4_file *f) {
    static const char *const keys[] = {"blobs", "provenance", "tensors"};
    const uint8_t *text = f->bytes + 128, *values[3];
    w4__walk walk = {NULL, 0, 0};
    int error = w4__canonical(text, f->index_nbytes);
    if (error) return error;
    walk.file = f;
    if (!w4__exactly(text, keys, 3, values)) return W4__CLAUSE(3, 3);
    error = w4__blobs(&walk, values[0]);
    if (!error) error = w4__provenance(f, values[1]);
    if (!error) error = w4__tensors(&walk, values[2]);
    if (error) return error;
    if (walk.n_parts != f->n_parts) return W4__CLAUSE(3, 9);
    if (w4__round_up(walk.end, 64) != f->data_nbytes) return W4__CLAUSE(4, 4);
    return 0;
}

/* ---- w4-container 4: data section ------------------------------------------------------------------------------ */

static uint32_t w4__pad_code(w4_scheme scheme) { /* w4-codes 3.5 */
    return scheme == W4_INT4 || scheme == W4_INT4Z ? 8 : scheme == W4_NF4 ? 7 : 0;
}

/* w4-codes 3.2: the code or value, as bits, of column k. row: the first dword of a row, the next ones 64 bytes apart. */
static uint32_t w4__code(const uint8_t *row, uint32_t bits, uint64_t k) {
    uint32_t shift = (uint32_t)(8 * (k % 4) + 4 * (k / 4 % 2)), per_dword = 32 / bits;
    if (bits == 4) return w4__u32(row + k / 8 * 64) >> shift & 15u;
    if (bits == 3) {
        row += k / 32 * 3 * 64;
        if (k % 32 < 24) return w4__u32(row + k % 32 / 8 * 64) >> shift & 7u;
        shift += 3;
        return (w4__u32(row) >> shift & 1u) | (w4__u32(row + 64) >> shift & 1u) << 1 | (w4__u32(row + 128) >> shift & 1u) << 2;
    }
    return w4__u32(row + k / per_dword * 64) >> (bits * (k % per_dword)) & 0xFFFFFFFFu >> (32 - bits);
}

static int w4__code_padding(const w4_tensor *t, const uint8_t *p) { /* 4.5, codes and values */
    uint64_t n_lines = w4__n_lines(t), matrix, tile, row, k;
    uint32_t bits = w4__bits[t->scheme], pad = w4__pad_code(t->scheme);
    uint64_t n_columns = bits == 3 ? n_lines / 3 * 32 : n_lines * (32 / bits); /* padded */
    for (matrix = 0; matrix < t->n_matrices; matrix++)
        for (tile = 0; tile < w4__n_tiles(t); tile++)
            for (row = 0; row < 16; row++) {
                const uint8_t *first = p + ((matrix * w4__n_tiles(t) + tile) * n_lines * 16 + row) * 4;
                for (k = 16 * tile + row < t->n_rows ? t->n_columns : 0; k < n_columns; k++)
                    if (w4__code(first, bits, k) != pad) return W4__CLAUSE(4, 5);
            }
    return 0;
}

static int w4__group_padding(const w4_tensor *t, w4_kind kind, const uint8_t *p) { /* 4.5, 4.6; w4-codes 3.4 */
    uint64_t matrix, tile, group;
    uint32_t width = w4__width(t, kind), row;
    int dirty = 0;
    for (matrix = 0; matrix < t->n_matrices; matrix++)
        for (tile = 0; tile < w4__n_tiles(t); tile++)
            for (group = 0; group < w4__n_runs(t, kind); group++)
                for (row = 0; row < 16; row++, p += width) {
                    if (kind == W4_ZERO_POINTS && *p > 15) return W4__CLAUSE(4, 6);
                    if (width == 2 && (w4__u16(p) & 0x7C00u) == 0x7C00u) return W4__CLAUSE(4, 6);
                    if (width == 4 && (w4__u32(p) & 0x7F800000u) == 0x7F800000u) return W4__CLAUSE(4, 6);
                    if (16 * tile + row >= t->n_rows) dirty |= !w4__all_zero(p, width);
                }
    return dirty ? W4__CLAUSE(4, 5) : 0;
}

static int w4__check_part(const w4_file *f, uint64_t offset, uint64_t nbytes, uint32_t index) {
    const uint8_t *digest = f->bytes + f->data_offset + f->data_nbytes + 32 * (uint64_t)index;
    if (!w4__digest_is(f->bytes + offset, nbytes, digest)) return W4__CLAUSE(5, 1);
    if (!w4__all_zero(f->bytes + offset + nbytes, (64 - (offset + nbytes) % 64) % 64)) return W4__CLAUSE(4, 3);
    return 0;
}

/* ---- w4-container 5: trailer ----------------------------------------------------------------------------------- */

const uint8_t *w4_conversion_digest(const w4_file *f) { return f->bytes + f->nbytes - 32; }

static int w4__trailer(const w4_file *f) {
    const uint8_t *trailer = f->bytes + f->data_offset + f->data_nbytes;
    uint8_t found[32];
    w4__blake3 h;
    w4__blake3_init(&h);
    w4__blake3_update(&h, f->bytes + 96, 32);
    w4__blake3_update(&h, trailer, 32 * ((uint64_t)f->n_parts + f->n_sources));
    w4__blake3_final(&h, found);
    return memcmp(found, w4_conversion_digest(f), 32) == 0 ? 0 : W4__CLAUSE(5, 3);
}

/* ---- w4-container 7: readers ----------------------------------------------------------------------------------- */

int w4_open(w4_file *f, const void *bytes, uint64_t nbytes) {
    int error;
    memset(f, 0, sizeof *f);
    f->bytes = (const uint8_t *)bytes;
    f->nbytes = nbytes;
    error = w4__header(f);
    if (!error) error = w4__index(f);
    if (!error && !w4__all_zero(f->bytes + 128 + f->index_nbytes, f->data_offset - 128 - f->index_nbytes))
        error = W4__CLAUSE(4, 1);
    if (!error) error = w4__trailer(f);
    if (error) w4_close(f);
    return error;
}

void w4_close(w4_file *f) {
    free(f->blobs);
    free(f->tensors);
    free(f->by_name);
    memset(f, 0, sizeof *f);
}

int w4_verify(const w4_file *f, uint32_t *part) {
    uint32_t i, k, unused;
    int error = 0;
    if (!part) part = &unused;
    for (i = 0; i < f->n_blobs; i++) {
        *part = f->blobs[i].index;
        error = w4__check_part(f, f->blobs[i].offset, f->blobs[i].nbytes, *part);
        if (error) return error;
    }
    for (i = 0; i < f->n_tensors; i++) {
        const w4_tensor *t = &f->tensors[i];
        for (k = 0; k < t->n_parts; k++) {
            const w4_part *p = &t->parts[k];
            const uint8_t *raw = f->bytes + p->offset;
            *part = p->index;
            error = w4__check_part(f, p->offset, p->nbytes, p->index);
            if (!error && t->rank >= 2 && p->nbytes)
                error = p->kind == W4_CODES || p->kind == W4_VALUES ? w4__code_padding(t, raw)
                                                                      : w4__group_padding(t, p->kind, raw);
            if (error) return error;
        }
    }
    return 0;
}

const w4_tensor *w4_find(const w4_file *f, const char *name) {
    uint32_t low = 0, high = f->n_tensors;
    size_t length = strlen(name);
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const w4_tensor *t = &f->tensors[f->by_name[middle]];
        int order = w4__compare_names(&t->name, name, length, 1);
        if (order == 0) return t;
        if (order < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return NULL;
}

const w4_blob *w4_find_blob(const w4_file *f, const char *name) {
    uint32_t i;
    for (i = 0; i < f->n_blobs; i++)
        if (w4__compare_names(&f->blobs[i].name, name, strlen(name), 1) == 0) return &f->blobs[i];
    return NULL;
}

/* ---- w4-codes 5: dequantization -------------------------------------------------------------------------------- */

static float w4__f32(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static float w4__f16(uint32_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3FFu;
    if (exponent == 31) return w4__f32(sign | 0x7F800000u | fraction << 13);
    if (exponent) return w4__f32(sign | (exponent + 112) << 23 | fraction << 13);
    /* fraction * 2^-24, exactly */
    return (sign ? -1.0f : 1.0f) * ((float)fraction * w4__f32(0x33800000u));
}

static int w4__i8(uint32_t byte) { return byte > 127 ? (int)byte - 256 : (int)byte; }

static float w4__scale(const w4_tensor *t, const uint8_t *p, const uint8_t *supers, uint64_t group) { /* or an offset */
    if (t->scale == W4_SCALE_F32) return w4__f32(w4__u32(p + 64 * group));
    if (t->scale == W4_SCALE_F16) return w4__f16(w4__u16(p + 32 * group));
    if (t->scale == W4_SCALE_S6) return w4__f16(w4__u16(supers)) * (float)(w4__i8(p[16 * group] << 2 & 255u) / 4); /* 2.6 */
    return w4__f16(w4__u16(supers + 32 * (group * t->group_size / 256))) * (float)w4__i8(p[16 * group]); /* 2.5 */
}

/* Where a row of a part behind the codes begins. NULL: the tensor has no such part. */
static const uint8_t *w4__row_part(const w4_file *f, const w4_tensor *t, w4_kind kind, uint64_t tile, uint64_t lane) {
    uint32_t i = 0;
    while (i < t->n_parts && t->parts[i].kind != kind) i++;
    if (i == t->n_parts) return NULL;
    return f->bytes + t->parts[i].offset + (tile * w4__n_runs(t, kind) * 16 + lane) * w4__width(t, kind);
}

uint64_t w4_n_rows(const w4_tensor *t) { return t->n_matrices * t->n_rows; }

void w4_row(const w4_file *f, const w4_tensor *t, uint64_t row, float *out) {
    const uint8_t *raw = f->bytes + t->parts[0].offset, *scales, *supers, *points, *offsets, *super_offsets;
    uint32_t bits = w4__bits[t->scheme];
    uint64_t matrix, within, tile, lane, k;
    if (row >= w4_n_rows(t)) return;
    if (t->rank < 2) { /* 3.1: one after another */
        for (k = 0; k < t->n_columns; k++)
            out[k] = bits == 32 ? w4__f32(w4__u32(raw + 4 * k))
                     : t->scheme == W4_BF16 ? w4__f32(w4__u16(raw + 2 * k) << 16) : w4__f16(w4__u16(raw + 2 * k));
        return;
    }
    matrix = row / t->n_rows;
    within = row % t->n_rows;
    tile = matrix * w4__n_tiles(t) + within / 16;
    lane = within % 16;
    raw += (tile * w4__n_lines(t) * 16 + lane) * 4;
    scales = w4__row_part(f, t, W4_SCALES, tile, lane);
    supers = w4__row_part(f, t, W4_SUPER_SCALES, tile, lane);
    points = w4__row_part(f, t, W4_ZERO_POINTS, tile, lane);
    offsets = w4__row_part(f, t, W4_OFFSETS, tile, lane);
    super_offsets = w4__row_part(f, t, W4_SUPER_OFFSETS, tile, lane);
    for (k = 0; k < t->n_columns; k++) {
        uint32_t code = w4__code(raw, bits, k);
        uint64_t group = t->group_size ? k / t->group_size : 0;
        float level, scale;
        volatile float product; /* so that no compiler fuses it with the sum */
        if (bits == 32) {
            out[k] = w4__f32(code);
            continue;
        }
        if (bits == 16) {
            out[k] = t->scheme == W4_BF16 ? w4__f32(code << 16) : w4__f16(code);
            continue;
        }
        scale = w4__scale(t, scales, supers, group);
        switch (t->scheme) {
            case W4_INT4: level = (float)((int)code - 8); break;
            case W4_INT4Z: level = (float)((int)code - (int)points[16 * group]); break;
            case W4_INT4O: level = (float)code; break;
            case W4_NF4: case W4_FP4: case W4_E2M1: case W4_IQ4NL: level = w4__f32(w4__codebook(t->scheme)[code]); break;
            case W4_NL3: level = w4__f32(w4__codebook(t->scheme)[code]) + (float)(scales[16 * group] >> 6) * 12.0f - 18.0f; break;
            case W4_NL4: level = w4__f32(w4__codebook(t->scheme)[code]) + (float)(scales[16 * group] >> 6) * 8.0f - 12.0f; break;
            default: level = (float)w4__i8(code); break;
        }
        product = level * scale; /* 5.1 */
        out[k] = offsets ? product + w4__scale(t, offsets, super_offsets, group) : product;
    }
}

#endif /* W4_IMPLEMENTATION */
