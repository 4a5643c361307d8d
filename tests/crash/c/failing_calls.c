/* An LD_PRELOAD shim that lets one system call fail, as a disk, a quota or a file server may.
 *
 * W4_FAIL_CALL: fsync (of files), fsyncdir (of directories), write. W4_FAIL_ERRNO: its number. W4_FAIL_AFTER: calls that
 * go well before. Writes count only to files whose path contains ".partial". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static int fails(const char *call) {
    static int seen;
    const char *which = getenv("W4_FAIL_CALL"), *number = getenv("W4_FAIL_ERRNO"), *after = getenv("W4_FAIL_AFTER");
    if (!which || !number || strcmp(which, call) != 0) return 0;
    if (seen++ < (after ? atoi(after) : 0)) return 0;
    errno = atoi(number);
    return 1;
}

int fsync(int fd) {
    int (*real)(int);
    struct stat status;
    *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    if (fstat(fd, &status) == 0 && fails(S_ISDIR(status.st_mode) ? "fsyncdir" : "fsync")) return -1;
    return real(fd);
}

ssize_t write(int fd, const void *data, size_t n) {
    ssize_t (*real)(int, const void *, size_t);
    char link[64], path[4096];
    ssize_t length;
    *(void **)&real = dlsym(RTLD_NEXT, "write");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        if (strstr(path, ".partial") && fails("write")) return -1;
    }
    return real(fd, data, n);
}
