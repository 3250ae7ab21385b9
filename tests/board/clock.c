/* A clock that is wrong, from outside of the program: a library for LD_PRELOAD.

   It shifts what a process sees of the time of day, as a change of the system's clock does; the monotonic clock goes on.
   Waits until a time of day are shifted back, because the kernel's clock is not wrong.

   BOARD_SKEW   seconds by which the clock is always ahead
   BOARD_JUMP   a file; from when it exists, the clock is ahead by as many seconds as it says, too */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define EARLIEST 1000000000 /* a time that is later than this is one of day: the monotonic clock begins at 0 */

static long shift(void) {
  const char *skew = getenv("BOARD_SKEW"), *jump = getenv("BOARD_JUMP");
  long seconds = skew ? atol(skew) : 0;
  if (jump) {
    char text[32] = "";
    int fd = syscall(SYS_openat, AT_FDCWD, jump, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
      if (syscall(SYS_read, fd, text, sizeof text - 1) > 0) seconds += atol(text);
      syscall(SYS_close, fd);
    }
  }
  return seconds;
}

int clock_gettime(clockid_t which, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, which, now);
  if (!failed && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) now->tv_sec += shift();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  int failed = syscall(SYS_gettimeofday, now, zone);
  if (!failed) now->tv_sec += shift();
  return failed;
}

time_t time(time_t *out) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out) *out = now.tv_sec;
  return now.tv_sec;
}

static struct timespec unshifted(const struct timespec *until) {
  struct timespec kernel = *until;
  if (kernel.tv_sec > EARLIEST) kernel.tv_sec -= shift();
  return kernel;
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  struct timespec kernel = unshifted(until);
  return real(condition, mutex, &kernel);
}

int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t which,
                           const struct timespec *until) {
  static int (*real)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
  struct timespec kernel = unshifted(until);
  return real(condition, mutex, which, &kernel);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
  static int (*real)(sem_t *, const struct timespec *);
  if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
  struct timespec kernel = unshifted(until);
  return real(semaphore, &kernel);
}
