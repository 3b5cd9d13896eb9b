"""Names and addresses that mean something else than they should, and clocks."""

from tests.lab.planted.environments import library
from tests.lab.planted.scenes import planted

CLOCK = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t id, struct timespec *now) {
    int error = (int)syscall(SYS_clock_gettime, id, now);
    if (!error && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += AHEAD;
    return error;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec fine;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &fine);
    now->tv_sec = fine.tv_sec;
    now->tv_usec = fine.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *seconds) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (seconds) *seconds = now.tv_sec;
    return now.tv_sec;
}
"""
"""The clock of a lab host is that of the machine, which nobody may set: its programs are told another time."""


def call_it(scene, name: str, hostname: str) -> None:
    """Give a host another name."""
    scene.shell(scene[name], f"hostname {hostname}; rm -f /etc/hostname; echo {hostname} > /etc/hostname")


@planted("N01")
def two_hosts_call_themselves_localhost(scene):
    call_it(scene, "h0", "localhost")
    call_it(scene, "h1", "localhost")


@planted("N02", special={"h1": {"hosts_file": "debian"}})
def the_own_name_is_127_0_1_1(scene):
    """Nothing to do: the lab writes the hosts file as Debian's installer does."""


@planted("N03", nics=2)
def one_machine_under_two_names(scene):
    """Its second card has a name of its own in the user's ssh_config."""
    scene.shell(
        scene.desk,
        'cd "$HOME"/.ssh && cat >> config && sed "s/^10.77.0.10/10.78.0.10/" known_hosts | grep ^10.78 >> known_hosts',
        stdin=f"\nHost h0-fast\n HostName 10.78.0.10\n User {scene['h0'].login}\n IdentityFile ~/.ssh/id_ed25519\n",
    )
    scene.file["hosts"].append({**scene.entry("h0"), "name": "h2", "ssh": "h0-fast", "address": "10.78.0.10"})


@planted("N04")
def the_address_is_of_no_interface(scene):
    scene.entry("h1")["address"] = "10.77.0.99"


@planted("N05")
def the_hosts_file_sends_a_name_elsewhere(scene):
    scene.shell(scene["h0"], "sed 's/^10.77.0.11 /10.77.0.99 /' /etc/hosts > /tmp/hosts && cat /tmp/hosts > /etc/hosts")


def set_clock(scene, name: str, ahead_s: int) -> None:
    """Let all that starts on a host from now on see another time."""
    scene[name].write("/usr/local/lib/clock.so", library(CLOCK, f"-DAHEAD=({ahead_s})"), 0o755)
    scene[name].write("/etc/ld.so.preload", "/usr/local/lib/clock.so\n")


@planted("C01")
def a_clock_90_seconds_ahead(scene):
    set_clock(scene, "h1", 90)


@planted("C02")
def a_clock_a_day_behind(scene):
    set_clock(scene, "h1", -86400)
