/* Print a tensor of a .w4 file, or list what the file holds.
 *
 *     cc -std=c99 -O2 -I formats/c -o print_tensor docs/examples/print_tensor.c
 *     ./print_tensor model.w4                           # names, schemes, shapes
 *     ./print_tensor model.w4 model.norm.weight         # its values, a row a line
 */
#define W4_IMPLEMENTATION
#include "w4_reader.h"

#include <stdio.h>

static uint8_t *read_file(const char *path, size_t *nbytes) {
    FILE *stream = fopen(path, "rb");
    uint8_t *bytes = NULL;
    long size = -1;
    if (stream && fseek(stream, 0, SEEK_END) == 0) size = ftell(stream);
    if (size >= 0) bytes = (uint8_t *)malloc(size > 0 ? (size_t)size : 1);
    if (bytes) {
        rewind(stream);
        *nbytes = fread(bytes, 1, (size_t)size, stream);
    }
    if (stream) fclose(stream);
    return bytes;
}

static void list(const w4_file *file) {
    uint32_t i, axis;
    for (i = 0; i < file->n_tensors; i++) {
        const w4_tensor *t = &file->tensors[i];
        printf("%.*s\t%s\t[", (int)t->name.length, t->name.text, w4_scheme_name(t->scheme));
        for (axis = 0; axis < t->rank; axis++) printf("%s%llu", axis ? ", " : "", (unsigned long long)t->shape[axis]);
        printf("]\n");
    }
}

static int print(const w4_file *file, const w4_tensor *t) {
    float *values = (float *)malloc(t->n_columns ? (size_t)t->n_columns * sizeof(float) : 1);
    uint64_t row, k;
    if (!values) return 1;
    for (row = 0; t->n_columns && row < w4_n_rows(t); row++) {
        w4_row(file, t, row, values);
        for (k = 0; k < t->n_columns; k++) printf("%s%.9g", k ? " " : "", (double)values[k]);
        printf("\n");
    }
    free(values);
    return 0;
}

int main(int argc, char **argv) {
    w4_file file;
    const w4_tensor *tensor;
    uint8_t *bytes;
    size_t nbytes = 0;
    int error;
    if (argc < 2 || argc > 3) {
        fprintf(stderr, "usage: %s FILE [TENSOR]\n", argv[0]);
        return 2;
    }
    bytes = read_file(argv[1], &nbytes);
    if (!bytes) {
        fprintf(stderr, "%s: cannot be read\n", argv[1]);
        return 3;
    }
    error = w4_open(&file, bytes, nbytes);
    if (!error) error = w4_verify(&file, NULL);
    if (error) {
        fprintf(stderr, "%s: breaks w4-container %d.%d\n", argv[1], error / 100, error % 100);
        return 3;
    }
    tensor = argc == 3 ? w4_find(&file, argv[2]) : NULL;
    if (argc == 3 && !tensor) {
        fprintf(stderr, "%s: there is no tensor %s\n", argv[1], argv[2]);
        return 2;
    }
    if (tensor)
        error = print(&file, tensor);
    else
        list(&file);
    w4_close(&file);
    free(bytes);
    return error;
}
