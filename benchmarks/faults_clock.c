/* A clock that is wrong by as many seconds as a file says, for every program of a lab host (/etc/ld.so.preload): the
 * real clock is that of the whole machine, and nobody in a lab may set it. Times of files stay those of the machine.
 * Waits of the C library until a moment of the wrong clock are turned back, so that they last as long as they should. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t right = 0;
static const volatile int64_t *wrong_s = &right;

__attribute__((constructor)) static void begin(void) {
    int file = open("/var/lib/lab-clock", O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    void *map = mmap(0, 8, PROT_READ, MAP_SHARED, file, 0);
    if (map != MAP_FAILED) wrong_s = map;
    close(file);
}

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real ? real(clock, now) : (int)syscall(SYS_clock_gettime, clock, now);
    if (code == 0 && is_wall(clock)) now->tv_sec += *wrong_s;
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}

/* Moments after 2001 are of the wall clock; what counts from the start of the machine is smaller. */
static struct timespec turned_back(const struct timespec *until) {
    struct timespec moment = *until;
    if (moment.tv_sec > 1000000000) moment.tv_sec -= *wrong_s;
    return moment;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until) {
    static int (*real)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    /* the default of dlsym is the one of 1997 */
    if (!real) real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real) real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec moment = turned_back(until);
    return real(condition, mutex, &moment);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict until) {
    static int (*real)(pthread_mutex_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    struct timespec moment = turned_back(until);
    return real(mutex, &moment);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict until) {
    static int (*real)(sem_t *, const struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "sem_timedwait");
    struct timespec moment = turned_back(until);
    return real(semaphore, &moment);
}
