/* Coverage-guided fuzzing of the C reader by libFuzzer:
 *
 *     clang -g -O1 -fsanitize=fuzzer,address,undefined -I formats/c -o c_reader_fuzzer tests/fuzz/c_reader_fuzzer.c
 *     ./c_reader_fuzzer -max_len=65536 corpus formats/vectors/valid
 *
 * Every digest of a changed file is made right again, most of the time, so that the rules behind them are reached. */
#define W4_IMPLEMENTATION
#include "w4_reader.h"

size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void digest(const uint8_t *p, uint64_t n, uint8_t *out) {
    w4__blake3 h;
    w4__blake3_init(&h);
    w4__blake3_update(&h, p, n);
    w4__blake3_final(&h, out);
}

static void put_u64(uint8_t *p, uint64_t value) {
    int i;
    for (i = 0; i < 8; i++) p[i] = (uint8_t)(value >> 8 * i);
}

/* Sizes and digests of the header and trailer made right for what lies between them. */
static void seal(uint8_t *data, size_t size, unsigned seed) {
    uint64_t index_nbytes, data_end, n_digests, i;
    w4_file file;
    if (size < 128) return;
    index_nbytes = w4__u64(data + 24);
    if (index_nbytes > size - 128) return;
    if (seed % 16) put_u64(data + 32, w4__round_up(128 + index_nbytes, 4096));
    put_u64(data + 16, size);
    digest(data + 128, index_nbytes, data + 64);
    digest(data, 96, data + 96);
    n_digests = (uint64_t)w4__u32(data + 48) + w4__u32(data + 52) + 1;
    if (n_digests > size / 32) return;
    data_end = size - 32 * n_digests;
    /* The places of parts are known once the file opens but for its trailer; so that is sealed last. */
    memset(&file, 0, sizeof file);
    file.bytes = data;
    file.nbytes = size;
    if (w4__header(&file) == 0 && file.data_offset + file.data_nbytes == data_end) {
        if (w4__index(&file) == 0) {
            uint32_t t, k;
            for (i = 0; i < file.n_blobs; i++)
                digest(data + file.blobs[i].offset, file.blobs[i].nbytes, data + data_end + 32 * file.blobs[i].index);
            for (t = 0; t < file.n_tensors; t++)
                for (k = 0; k < file.tensors[t].n_parts; k++) {
                    const w4_part *part = &file.tensors[t].parts[k];
                    digest(data + part->offset, part->nbytes, data + data_end + 32 * part->index);
                }
        }
        w4_close(&file);
    }
    {
        w4__blake3 h;
        w4__blake3_init(&h);
        w4__blake3_update(&h, data + 96, 32);
        w4__blake3_update(&h, data + data_end, size - 32 - data_end);
        w4__blake3_final(&h, data + size - 32);
    }
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed) {
    uint64_t index_nbytes = size >= 128 ? w4__u64(data + 24) : 0;
    if (size >= 128 && index_nbytes <= size - 128 && seed % 8 < 5) {
        /* Change the index within its page, where it may grow and shrink. */
        uint64_t room = w4__round_up(128 + index_nbytes, 4096) - 128;
        size_t n;
        if (room > size - 128) room = size - 128;
        n = LLVMFuzzerMutate(data + 128, (size_t)index_nbytes, (size_t)room);
        if (n < index_nbytes) memset(data + 128 + n, 0, (size_t)index_nbytes - n);
        put_u64(data + 24, n);
    } else {
        size = LLVMFuzzerMutate(data, size, max_size);
    }
    if (seed / 8 % 32) seal(data, size, seed / 256);
    return size;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    w4_file file;
    uint8_t *exact = (uint8_t *)malloc(size ? size : 1); /* so that a byte read too far is seen */
    float *row = NULL;
    uint32_t i;
    if (!exact) return 0;
    memcpy(exact, data, size);
    if (w4_open(&file, exact, size) == 0) {
        (void)w4_verify(&file, NULL);
        (void)w4_find(&file, "model.norm.weight");
        (void)w4_find_blob(&file, "config.json");
        for (i = 0; i < file.n_tensors; i++) {
            const w4_tensor *t = &file.tensors[i];
            uint64_t r, n = t->n_columns ? w4_n_rows(t) : 0;
            row = (float *)malloc(t->n_columns ? (size_t)t->n_columns * sizeof(float) : 1);
            for (r = 0; row && r < n && r < 64; r++) w4_row(&file, t, n - 1 - r, row);
            free(row);
        }
        w4_close(&file);
    }
    free(exact);
    return 0;
}
