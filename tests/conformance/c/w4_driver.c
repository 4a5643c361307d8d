/* What the C reader makes of files, for the tests to compare.
 *
 * Input: for each file 8 bytes of length and its bytes. Output for each: int32 error of opening, int32 error of verifying
 * (0 where it was not opened), uint32 number of tensors, and for each tensor uint64 number of values and the values.
 * Little-endian. Each file is in memory of its exact size, so that AddressSanitizer sees a byte read too far. */
#define W4_IMPLEMENTATION
#include "w4_reader.h"

#include <stdio.h>

static void put(const void *data, size_t n) {
    if (n && fwrite(data, 1, n, stdout) != n) exit(2);
}

int main(void) {
    uint64_t n;
    while (fread(&n, sizeof n, 1, stdin) == 1) {
        w4_file file;
        uint8_t *bytes = (uint8_t *)malloc(n ? (size_t)n : 1);
        int32_t opened, verified = 0;
        uint32_t i;
        if (!bytes || fread(bytes, 1, (size_t)n, stdin) != n) return 2;
        opened = w4_open(&file, bytes, n);
        if (!opened) verified = w4_verify(&file, NULL);
        put(&opened, 4);
        put(&verified, 4);
        put(&file.n_tensors, 4);
        for (i = 0; i < file.n_tensors; i++) {
            const w4_tensor *t = &file.tensors[i];
            uint64_t row, n_values = w4_n_rows(t) * t->n_columns;
            float *values = (float *)malloc(t->n_columns ? (size_t)t->n_columns * sizeof(float) : 1);
            if (!values) return 2;
            put(&n_values, 8);
            for (row = 0; n_values && row < w4_n_rows(t); row++) {
                w4_row(&file, t, row, values);
                put(values, (size_t)t->n_columns * sizeof(float));
            }
            free(values);
        }
        w4_close(&file);
        free(bytes);
    }
    return 0;
}
