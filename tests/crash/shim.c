/* Preloaded into a process that writes a mirror: logs each write and sync of data.mdb, and makes chosen ones fail.
 * The log is what a power cut may leave of the file: see test_power_cut.py. Failing ones: see test_disk_errors.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int log_fd = -2;
static long fail_syncs = 0;
static long operations = 0, fail_from = -1, fail_count = 0; /* of writes and syncs together */
static int fail_errno = 0;
static ssize_t (*real_write)(int, const void *, size_t);

struct __attribute__((packed)) entry {
    char kind; /* w: write, s: synced at once, f: sync, x: sync that failed, m: mark */
    int64_t offset, length;
};

static void start(void) {
    if (log_fd != -2) return;
    real_write = dlsym(RTLD_NEXT, "write");
    const char *path = getenv("POWER_CUT_LOG");
    log_fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
}

static void note(char kind, int64_t offset, const void *data, int64_t length) {
    struct entry entry = {kind, offset, length};
    if (log_fd < 0) return;
    real_write(log_fd, &entry, sizeof entry);
    if (data) real_write(log_fd, data, length);
}

static int is_data(int fd, int *at_once) {
    char link[64], name[512];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length <= 0) return 0;
    name[length] = 0;
    if (!strstr(name, "data.mdb")) return 0;
    *at_once = (fcntl(fd, F_GETFL) & O_DSYNC) != 0;
    return 1;
}

static int fails(void) {
    long number = operations++;
    if (fail_from < 0 || number < fail_from || number >= fail_from + fail_count) return 0;
    errno = fail_errno;
    return 1;
}

static int write_fails(int fd) {
    int at_once;
    return is_data(fd, &at_once) && fails();
}

static void wrote(int fd, int64_t offset, const void *data, ssize_t length) {
    int at_once = 0;
    if (length <= 0 || !is_data(fd, &at_once)) return;
    note('w', offset, data, length);
    if (at_once) note('s', offset, 0, length);
}

static void wrote_all(int fd, int64_t offset, const struct iovec *parts, int count, ssize_t total) {
    if (total <= 0) return;
    for (int i = 0; i < count; i++) {
        wrote(fd, offset, parts[i].iov_base, parts[i].iov_len);
        offset += parts[i].iov_len;
    }
}

static int synced(int fd, const char *name) {
    int at_once;
    int (*real)(int) = dlsym(RTLD_NEXT, name);
    start();
    if (!is_data(fd, &at_once)) return real(fd);
    if (fail_syncs > 0) {
        fail_syncs--;
        note('x', 0, 0, 0);
        errno = EIO;
        return -1;
    }
    if (fails()) {
        note('x', 0, 0, 0);
        return -1;
    }
    note('f', 0, 0, 0);
    return 0;
}

void power_cut_mark(long number) { start(); note('m', number, 0, 0); }
void power_cut_fail_syncs(long count) { fail_syncs = count; }
void disk_errors(long from, long count, int code) { operations = 0; fail_from = from; fail_count = count; fail_errno = code; }
long disk_operations(void) { return operations; }
int fdatasync(int fd) { return synced(fd, "fdatasync"); }
int fsync(int fd) { return synced(fd, "fsync"); }

#define WRITE_AT(NAME, OFFSET) \
    ssize_t NAME(int fd, const void *data, size_t length, OFFSET offset) { \
        ssize_t (*real)(int, const void *, size_t, OFFSET) = dlsym(RTLD_NEXT, #NAME); \
        start(); \
        if (write_fails(fd)) return -1; \
        ssize_t done = real(fd, data, length, offset); \
        wrote(fd, offset, data, done); \
        return done; \
    }
WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)

#define WRITE_PARTS_AT(NAME, OFFSET) \
    ssize_t NAME(int fd, const struct iovec *parts, int count, OFFSET offset) { \
        ssize_t (*real)(int, const struct iovec *, int, OFFSET) = dlsym(RTLD_NEXT, #NAME); \
        start(); \
        if (write_fails(fd)) return -1; \
        ssize_t done = real(fd, parts, count, offset); \
        wrote_all(fd, offset, parts, count, done); \
        return done; \
    }
WRITE_PARTS_AT(pwritev, off_t)
WRITE_PARTS_AT(pwritev64, off64_t)

ssize_t write(int fd, const void *data, size_t length) {
    start();
    if (write_fails(fd)) return -1;
    int64_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t done = real_write(fd, data, length);
    wrote(fd, offset, data, done);
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    ssize_t (*real)(int, const struct iovec *, int) = dlsym(RTLD_NEXT, "writev");
    start();
    if (write_fails(fd)) return -1;
    int64_t offset = lseek(fd, 0, SEEK_CUR);
    ssize_t done = real(fd, parts, count);
    wrote_all(fd, offset, parts, count, done);
    return done;
}
