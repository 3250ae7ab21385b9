/* Faults of a disk, from outside of the program: a library for LD_PRELOAD.

   It counts the calls that change files below given folders, in one chosen process, and does something at the k-th: lose
   power, kill the process, report a full disk, write a wrong bit, be slow. Without BOARD_WHO it has no effect.

   BOARD_WHO    the process: "rank" or "writer" (of checkpoints), with ":1" only that of rank 1
   BOARD_BELOW  the folders, absolute, separated by colons
   BOARD_DO     count, power, kill, die, stop (by SIGSTOP), full, fail (with BOARD_ERRNO, BOARD_TIMES calls from
                the k-th on), flip, slow (at every call), deny (refuse to
                open for reading); of reads of open files by pread alone: eio (the k-th fails, with BOARD_TIMES as many),
                stall (it never returns), dieread (SIGKILL), slowread (each is slow)
   BOARD_K      the number of the call, from 1
   BOARD_LOG    a file that gets one line per counted call: name and path
   BOARD_ONCE   if set, without effect in processes that find the file of BOARD_LOG: only the first one has the fault
   BOARD_TOP    for power and kill: all ancestors of this process below this one are killed as well
   BOARD_SHARED a file by which all ranks and writers of a job, of which one has the fault, lose power together
   BOARD_SENDS  if set, messages to sockets without a file whose names begin so are counted too
   BOARD_TIMES  for eio, fail: how many fail; 0: all
   BOARD_ERRNO  for fail: the number of the error
   BOARD_MICRO  for slow, slowread: microseconds per call; for power and kill: the time before the k-th call, in which other
                processes get as far as they can
   BOARD_DENY   for deny: a part of the paths
   BOARD_NOROOM if set, every file system seems to have no free block

   power loses what a disk may lose: bytes written to a file and not flushed by fsync since, and names made or changed in
   a folder that was not flushed since. kill loses nothing, as when the kernel survives. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#if __SIZEOF_LONG__ != 8
#error "offsets of files are passed to the kernel as they are, which needs 64 bits"
#endif

#define PATHS 4096 /* entries of each table */
#define LONGEST 512 /* bytes of a path in a table */
typedef char text[PATH_MAX];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long calls;
static int done;

/* What a loss of power takes, of this process or, with BOARD_SHARED, of all. files: the bytes of each written file that
   survive it; fd: of the process pid. names: those that do not survive: made (from is ""), or changed from `from`; dev,
   ino: the folder that has to be flushed. */
static struct table {
  int busy, n_files, n_names;
  struct file { dev_t dev; ino_t ino; pid_t pid; int fd; off_t durable; } files[PATHS];
  struct name { char from[LONGEST], to[LONGEST]; dev_t dev; ino_t ino; int durable; } names[PATHS];
} *table;

static const char *setting(const char *name) { const char *value = getenv(name); return value ? value : ""; }

static void take_table(void) {
  if (!table) {
    int fd = -1, how = MAP_PRIVATE | MAP_ANONYMOUS;
    if (*setting("BOARD_SHARED")) {
      fd = syscall(SYS_openat, AT_FDCWD, setting("BOARD_SHARED"), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (fd < 0 || syscall(SYS_ftruncate, fd, sizeof *table)) abort();
      how = MAP_SHARED;
    }
    table = mmap(NULL, sizeof *table, PROT_READ | PROT_WRITE, how, fd, 0);
    if (table == MAP_FAILED) abort();
    if (fd >= 0) close(fd);
  }
  while (__atomic_exchange_n(&table->busy, 1, __ATOMIC_ACQUIRE)) sched_yield();
}
static void free_table(void) { __atomic_store_n(&table->busy, 0, __ATOMIC_RELEASE); }

static int is_mine(void) {
  static pid_t known;
  static int is_writer;
  const char *who = setting("BOARD_WHO");
  if (!*who) return 0;
  if (known != getpid()) {
    char line[4096];
    int fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, line, sizeof line);
    if (fd >= 0) close(fd);
    is_writer = n > 0 && memmem(line, n, "ingot.trainer.checkpoint.writer", 31) != NULL;
    known = getpid();
  }
  const char *kind = is_writer ? "writer" : "rank";
  size_t n = strlen(kind);
  if (strncmp(who, kind, n)) return 0;
  return who[n] != ':' || !strcmp(setting("RANK"), who + n + 1);
}

/* Return whether calls of this process that make or change files count in a loss of power. */
static int is_tracked(void) { return is_mine() || (*setting("BOARD_WHO") && *setting("BOARD_SHARED")); }

static int is_below(const char *path) {
  for (const char *one = setting("BOARD_BELOW"); *one;) {
    size_t n = strcspn(one, ":");
    if (n && !strncmp(path, one, n) && (path[n] == '/' || !path[n])) return 1;
    one += n + (one[n] == ':');
  }
  return 0;
}

static void path_of(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, out, PATH_MAX - 1);
  out[n > 0 ? n : 0] = 0;
}

static void path_at(int folder, const char *name, char *out) {
  text base = "";
  if (*name != '/') {
    if (folder == AT_FDCWD) { if (!getcwd(base, sizeof base)) *base = 0; }
    else path_of(folder, base);
  }
  if (snprintf(out, PATH_MAX, "%s%s%s", base, *name == '/' ? "" : "/", name) >= PATH_MAX) *out = 0;
}

static void kill_all(void) {
  pid_t found[64], top = atoi(setting("BOARD_TOP"));
  int n = 0;
  for (pid_t pid = getpid(); pid > 1 && pid != top && n < 64;) {
    char file[64], line[512] = "";
    found[n++] = pid;
    snprintf(file, sizeof file, "/proc/%d/stat", pid);
    int fd = syscall(SYS_openat, AT_FDCWD, file, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, line, sizeof line - 1) <= 0) break;
    close(fd);
    char *end = strrchr(line, ')');
    if (!end || sscanf(end + 2, "%*c %d", &pid) != 1) break;
  }
  while (n--) kill(found[n], SIGKILL);
}

static void lose(void) {
  char link[64];
  take_table(); /* and keep it: nothing that another process still does is remembered */
  for (int i = table->n_names - 1; i >= 0; i--) {
    struct name *one = table->names + i;
    if (one->durable) continue;
    if (*one->from) syscall(SYS_renameat2, AT_FDCWD, one->to, AT_FDCWD, one->from, 0);
    else syscall(SYS_unlinkat, AT_FDCWD, one->to, 0);
  }
  for (int i = 0; i < table->n_files; i++) {
    struct file *one = table->files + i;
    struct stat now;
    snprintf(link, sizeof link, "/proc/%d/fd/%d", one->pid, one->fd);
    int fd = syscall(SYS_openat, AT_FDCWD, link, O_WRONLY | O_CLOEXEC);
    if (fd >= 0 && !fstat(fd, &now) && now.st_size > one->durable) (void)!syscall(SYS_ftruncate, fd, one->durable);
  }
}

/* Count one call. Returns 0 to carry it out, 1 to fail it, 2 to write a wrong bit. Is called with the lock held. */
static int counted(const char *call, const char *path) {
  const char *what = setting("BOARD_DO"), *log = setting("BOARD_LOG");
  long k = atol(setting("BOARD_K"));
  int takes_room = !strcmp(call, "write") || !strcmp(call, "create") || !strcmp(call, "mkdir");
  static int is_later;
  if (!calls++) is_later = *setting("BOARD_ONCE") && !access(log, F_OK);
  if (is_later) return 0;
  if (*log) {
    char line[PATH_MAX + 64];
    int n = snprintf(line, sizeof line, "%s %s\n", call, path);
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0) { (void)!syscall(SYS_write, fd, line, n); close(fd); }
  }
  if (!strcmp(what, "slow")) usleep(atol(setting("BOARD_MICRO")));
  if (k < 1 || calls < k || done) return 0;
  if (!strcmp(what, "power") || !strcmp(what, "kill")) {
    usleep(atol(setting("BOARD_MICRO")));
    if (*what == 'p') lose();
    kill_all();
  }
  if (!strcmp(what, "die")) kill(getpid(), SIGKILL);
  if (!strcmp(what, "stop")) { done = 1; kill(getpid(), SIGSTOP); }
  if (!strcmp(what, "fail")) {
    long times = atol(setting("BOARD_TIMES"));
    if (times && calls >= k + times) return 0;
    errno = atoi(setting("BOARD_ERRNO"));
    return 1;
  }
  if (!strcmp(what, "full") && takes_room) { done = 1; errno = ENOSPC; return 1; }
  if (!strcmp(what, "flip") && !strcmp(call, "write")) { done = 1; return 2; }
  return 0;
}

static void remember_file(int fd) {
  struct stat now;
  if (fstat(fd, &now) || !S_ISREG(now.st_mode)) return;
  take_table();
  int i = 0;
  while (i < table->n_files && (table->files[i].dev != now.st_dev || table->files[i].ino != now.st_ino)) i++;
  if (i == PATHS) abort(); /* or the loss of power would be milder than it claims */
  if (i == table->n_files) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int own = syscall(SYS_openat, AT_FDCWD, link, O_WRONLY | O_CLOEXEC);
    if (own >= 0) table->files[table->n_files++] = (struct file){now.st_dev, now.st_ino, getpid(), own, now.st_size};
  }
  free_table();
}

static void remember_name(const char *from, const char *to) {
  text folder;
  struct stat it;
  strcpy(folder, to);
  char *slash = strrchr(folder, '/');
  if (!slash) return;
  if (strlen(to) >= LONGEST || strlen(from) >= LONGEST) abort(); /* as for a full table */
  *slash = 0;
  if (stat(folder, &it)) return;
  take_table();
  if (table->n_names == PATHS) abort();
  struct name *one = table->names + table->n_names++;
  *one = (struct name){.dev = it.st_dev, .ino = it.st_ino};
  strcpy(one->from, from);
  strcpy(one->to, to);
  free_table();
}

static void remember_flush(int fd) {
  struct stat now;
  if (fstat(fd, &now)) return;
  take_table();
  for (int i = 0; i < table->n_names; i++)
    if (table->names[i].dev == now.st_dev && table->names[i].ino == now.st_ino) table->names[i].durable = 1;
  for (int i = 0; i < table->n_files; i++)
    if (table->files[i].dev == now.st_dev && table->files[i].ino == now.st_ino) table->files[i].durable = now.st_size;
  free_table();
}

/* 0, 1, 2 as `counted`; of a call on an open file. */
static int on_file(const char *call, int fd) {
  text path;
  if (!is_tracked()) return 0;
  path_of(fd, path);
  if (!is_below(path)) return 0;
  pthread_mutex_lock(&lock);
  int verdict = is_mine() ? counted(call, path) : 0;
  if (!verdict && strcmp(call, "fsync")) remember_file(fd);
  if (verdict == 2) remember_file(fd);
  pthread_mutex_unlock(&lock);
  return verdict;
}

/* The same of a call on a name. path: gets the whole path, "" if it is not counted. */
static int on_name(const char *call, int folder, const char *name, char *path) {
  *path = 0;
  if (!is_tracked()) return 0;
  path_at(folder, name, path);
  if (!is_below(path)) { *path = 0; return 0; }
  pthread_mutex_lock(&lock);
  int verdict = is_mine() ? counted(call, path) : 0;
  pthread_mutex_unlock(&lock);
  return verdict;
}

static ssize_t wrong_bit(int fd, const void *data, size_t n, long position) {
  void *aligned; /* for O_DIRECT */
  if (posix_memalign(&aligned, 4096, n ? n : 1)) abort();
  char *copy = aligned;
  memcpy(copy, data, n);
  if (n) copy[n / 2] ^= 1;
  ssize_t written = position < 0 ? syscall(SYS_write, fd, copy, n) : syscall(SYS_pwrite64, fd, copy, n, position);
  free(copy);
  return written;
}

ssize_t write(int fd, const void *data, size_t n) {
  int verdict = on_file("write", fd);
  if (verdict == 2) return wrong_bit(fd, data, n, -1);
  return verdict ? -1 : syscall(SYS_write, fd, data, n);
}

static ssize_t write_at(int fd, const void *data, size_t n, off_t position) {
  int verdict = on_file("write", fd);
  if (verdict == 2) return wrong_bit(fd, data, n, position);
  return verdict ? -1 : syscall(SYS_pwrite64, fd, data, n, position);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) { return write_at(fd, data, n, at); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) { return write_at(fd, data, n, at); }

ssize_t writev(int fd, const struct iovec *parts, int n) {
  return on_file("write", fd) == 1 ? -1 : syscall(SYS_writev, fd, parts, n);
}

static ssize_t send_file(int out, int in, off_t *at, size_t n) {
  return on_file("write", out) == 1 ? -1 : syscall(SYS_sendfile, out, in, at, n);
}
ssize_t sendfile(int out, int in, off_t *at, size_t n) { return send_file(out, in, at, n); }
ssize_t sendfile64(int out, int in, off64_t *at, size_t n) { return send_file(out, in, at, n); }

/* Count a message if it goes to a socket whose name begins with BOARD_SENDS. It can end the process, not fail. */
static void count_message(int fd) {
  const char *wanted = setting("BOARD_SENDS");
  struct sockaddr_un to = {0};
  socklen_t n = sizeof to - 1;
  if (!*wanted || !is_mine() || getpeername(fd, (struct sockaddr *)&to, &n) || to.sun_family != AF_UNIX) return;
  if (*to.sun_path || strncmp(to.sun_path + 1, wanted, strlen(wanted))) return;
  pthread_mutex_lock(&lock);
  counted("send", to.sun_path + 1);
  pthread_mutex_unlock(&lock);
}
ssize_t send(int fd, const void *data, size_t n, int flags) {
  count_message(fd);
  return syscall(SYS_sendto, fd, data, n, flags, NULL, 0);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
  count_message(fd);
  return syscall(SYS_sendmsg, fd, message, flags);
}

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *at, size_t n, unsigned flags) {
  return on_file("write", out) == 1 ? -1 : syscall(SYS_copy_file_range, in, from, out, at, n, flags);
}

static ssize_t read_at(int fd, void *data, size_t n, off_t at) {
  const char *what = setting("BOARD_DO"), *log = setting("BOARD_LOG");
  int fails = !strcmp(what, "eio"), stalls = !strcmp(what, "stall"), dies = !strcmp(what, "dieread");
  int is_slow = !strcmp(what, "slowread");
  text path;
  if ((fails || stalls || dies || is_slow) && is_mine()) {
    path_of(fd, path);
    if (is_below(path)) {
      if (is_slow) usleep(atol(setting("BOARD_MICRO")));
      static long reads;
      long number = __atomic_add_fetch(&reads, 1, __ATOMIC_SEQ_CST), k = atol(setting("BOARD_K"));
      long times = atol(setting("BOARD_TIMES"));
      if (fails && number >= k && (!times || number < k + times)) { errno = EIO; return -1; }
      if (stalls && number == k) for (;;) pause();
      if (dies && number == k && access(log, F_OK)) {
        close(syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_CLOEXEC, 0644));
        kill(getpid(), SIGKILL);
      }
    }
  }
  return syscall(SYS_pread64, fd, data, n, at);
}
ssize_t pread(int fd, void *data, size_t n, off_t at) { return read_at(fd, data, n, at); }
ssize_t pread64(int fd, void *data, size_t n, off64_t at) { return read_at(fd, data, n, at); }

static int shorten(int fd, off_t n) { return on_file("write", fd) == 1 ? -1 : (int)syscall(SYS_ftruncate, fd, n); }
int ftruncate(int fd, off_t n) { return shorten(fd, n); }
int ftruncate64(int fd, off64_t n) { return shorten(fd, n); }

static int flush(int fd, long call) {
  if (on_file("fsync", fd) == 1) return -1;
  int failed = syscall(call, fd);
  if (!failed && is_tracked()) { pthread_mutex_lock(&lock); remember_flush(fd); pthread_mutex_unlock(&lock); }
  return failed;
}
int fsync(int fd) { return flush(fd, SYS_fsync); }
int fdatasync(int fd) { return flush(fd, SYS_fdatasync); }

static int open_at(int folder, const char *name, int flags, mode_t mode) {
  text path = "";
  int is_new = 0;
  if (!strcmp(setting("BOARD_DO"), "deny") && (flags & O_ACCMODE) == O_RDONLY && is_mine()) {
    path_at(folder, name, path);
    if (is_below(path) && strstr(path, setting("BOARD_DENY"))) { errno = EACCES; return -1; }
  }
  if (flags & (O_CREAT | O_TRUNC)) {
    if (on_name("create", folder, name, path) == 1) return -1;
    is_new = *path && access(path, F_OK);
  }
  int fd = syscall(SYS_openat, folder, name, flags, mode);
  if (fd >= 0 && is_new && *path) {
    pthread_mutex_lock(&lock);
    remember_name("", path);
    pthread_mutex_unlock(&lock);
  }
  return fd;
}

#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, int); va_end(more); }
int open(const char *name, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return open_at(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return open_at(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return open_at(folder, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_at(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return open_at(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static int rename_at(int a, const char *from, int b, const char *to, unsigned flags) {
  text old, new;
  if (on_name("rename", b, to, new) == 1) return -1;
  int replaces = *new && !access(new, F_OK); /* either content may survive, so there is nothing to take back */
  if (*new) path_at(a, from, old);
  int failed = syscall(SYS_renameat2, a, from, b, to, flags);
  if (!failed && *new && !replaces) { pthread_mutex_lock(&lock); remember_name(old, new); pthread_mutex_unlock(&lock); }
  return failed;
}
int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_at(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
  return rename_at(a, from, b, to, flags);
}

static int link_at(int a, const char *from, int b, const char *to, int flags) {
  text path;
  return on_name("link", b, to, path) == 1 ? -1 : (int)syscall(SYS_linkat, a, from, b, to, flags);
}
int link(const char *from, const char *to) { return link_at(AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return link_at(a, from, b, to, flags); }

static int remove_at(int folder, const char *name, int flags) {
  text path;
  return on_name(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, name, path) == 1
             ? -1 : (int)syscall(SYS_unlinkat, folder, name, flags);
}
int unlink(const char *name) { return remove_at(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return remove_at(AT_FDCWD, name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) { return remove_at(folder, name, flags); }

static int make_at(int folder, const char *name, mode_t mode) {
  text path;
  return on_name("mkdir", folder, name, path) == 1 ? -1 : (int)syscall(SYS_mkdirat, folder, name, mode);
}
int mkdir(const char *name, mode_t mode) { return make_at(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return make_at(folder, name, mode); }

/* A disk that lasts to fail with EIO has vanished. One that is read-only still has room. */
static int is_gone(const char *path) {
  return !strcmp(setting("BOARD_DO"), "fail") && atoi(setting("BOARD_ERRNO")) == EIO && !atol(setting("BOARD_TIMES")) &&
         is_mine() && calls >= atol(setting("BOARD_K")) && is_below(path);
}

#define ROOM(name, kind) \
  int name(const char *path, struct kind *out) { \
    int (*real)(const char *, struct kind *) = dlsym(RTLD_NEXT, #name); \
    int failed = real(path, out); \
    if (!failed && *setting("BOARD_NOROOM")) out->f_bavail = out->f_bfree = 0; \
    return is_gone(path) ? (errno = EIO, -1) : failed; \
  }
ROOM(statvfs, statvfs)
ROOM(statvfs64, statvfs64)
