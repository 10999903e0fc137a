/* Numbered datagrams both ways at a rate, and a TCP stream beside them: in a guest, and at its peer.
 *
 * sequenced connect|listen OWN-ADDRESS OTHER-ADDRESS PORT RATE
 *
 * The one that connects sends a known pattern by TCP, which comes back from the other. SIGUSR2 prints the
 * counts, SIGUSR1 ends sending, SIGTERM prints the counts and ends.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define NUMBERS (1u << 24)
#define BURST 64 /* more than that behind its time, it does not catch up: a ring has 256 entries */
#define STREAM_NS 10000000
#define STREAM_BYTES 100

struct datagram {
    uint64_t number, sent_ns, received; /* received: how many of the other's its sender has, once each */
    uint8_t filling[40];
};

struct arrival {
    uint64_t number, at_ns, sent_ns;
};

static volatile sig_atomic_t quiet, ended, asked;
static uint8_t seen[NUMBERS / 8];
static uint64_t sent, received, twice, highest, others;
static struct arrival last;
static uint64_t silence_ns, unheard_ns; /* of arrivals, and of sending times of what arrived */
static uint64_t stream_sent, stream_back, stream_wrong;
static int broken;

static void on_signal(int number)
{
    if (number == SIGUSR1)
        quiet = 1;
    else if (number == SIGUSR2)
        asked = 1;
    else
        ended = 1;
}

static uint64_t now(clockid_t clock)
{
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1000000000ull + at.tv_nsec;
}

static void fail(const char *what)
{
    perror(what);
    exit(1);
}

static struct sockaddr_in address(const char *text, const char *port)
{
    struct sockaddr_in made = {.sin_family = AF_INET, .sin_port = htons(atoi(port))};
    if (inet_pton(AF_INET, text, &made.sin_addr) != 1)
        fail(text);
    return made;
}

static int bound(int kind, struct sockaddr_in own)
{
    int one = 1, size = 4 << 20, made = socket(AF_INET, kind, 0);
    setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (kind == SOCK_DGRAM) {
        setsockopt(made, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof size);
        setsockopt(made, SOL_SOCKET, SO_TIMESTAMPNS, &one, sizeof one);
    }
    if (made < 0 || bind(made, (struct sockaddr *)&own, sizeof own))
        fail("bind");
    return made;
}

/* Addresses and ports are those of the run before: its last segment may not be acknowledged yet. */
static int connected(struct sockaddr_in own, struct sockaddr_in other)
{
    for (int left = 300;; left--) {
        int made = bound(SOCK_STREAM, own);
        if (!connect(made, (struct sockaddr *)&other, sizeof other))
            return made;
        if (!left || (errno != EADDRNOTAVAIL && errno != ECONNREFUSED))
            fail("connect");
        close(made);
        usleep(100000);
    }
}

static void send_due(int udp, uint64_t *begun, uint64_t rate)
{
    uint64_t due = (now(CLOCK_MONOTONIC) - *begun) * rate / 1000000000;
    if (due > sent + BURST) {
        *begun += (due - sent - BURST) * 1000000000 / rate;
        due = sent + BURST;
    }
    while (sent < due) {
        struct datagram one = {sent, now(CLOCK_REALTIME), received, {0}};
        /* What the kernel does not take has no number: only what was sent can be lost. */
        if (send(udp, &one, sizeof one, MSG_DONTWAIT) != sizeof one)
            return;
        sent++;
    }
}

static void heard(struct datagram *one, uint64_t at_ns)
{
    if (one->number >= NUMBERS)
        return;
    uint8_t bit = 1 << one->number % 8;
    if (seen[one->number / 8] & bit) {
        twice++;
        return;
    }
    seen[one->number / 8] |= bit;
    if (received++) {
        if (at_ns > last.at_ns && at_ns - last.at_ns > silence_ns)
            silence_ns = at_ns - last.at_ns;
        if (one->sent_ns > last.sent_ns && one->sent_ns - last.sent_ns > unheard_ns)
            unheard_ns = one->sent_ns - last.sent_ns;
    }
    if (one->number > highest)
        highest = one->number;
    others = one->received;
    last = (struct arrival){one->number, at_ns, one->sent_ns};
}

static void receive_all(int udp)
{
    for (;;) {
        struct datagram one;
        char extra[64];
        struct iovec part = {&one, sizeof one};
        struct msghdr message = {0, 0, &part, 1, extra, sizeof extra, 0};
        if (recvmsg(udp, &message, MSG_DONTWAIT) != sizeof one)
            return;
        struct cmsghdr *stamp = CMSG_FIRSTHDR(&message);
        struct timespec at = {0, 0};
        if (stamp && stamp->cmsg_type == SCM_TIMESTAMPNS)
            memcpy(&at, CMSG_DATA(stamp), sizeof at);
        heard(&one, at.tv_sec * 1000000000ull + at.tv_nsec);
    }
}

static uint8_t pattern(uint64_t place)
{
    return place * 7 + (place >> 8);
}

static void stream_due(int tcp, uint64_t *next)
{
    if (now(CLOCK_MONOTONIC) < *next)
        return;
    *next = now(CLOCK_MONOTONIC) + STREAM_NS;
    uint8_t bytes[STREAM_BYTES];
    for (int n = 0; n < STREAM_BYTES; n++)
        bytes[n] = pattern(stream_sent + n);
    ssize_t taken = send(tcp, bytes, sizeof bytes, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (taken > 0)
        stream_sent += taken;
    else if (errno != EAGAIN)
        broken = 1;
}

/* The one that connects compares what comes back; the other sends it back. */
static void stream_in(int tcp, int connects)
{
    uint8_t bytes[4096];
    ssize_t got = recv(tcp, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got <= 0) {
        broken = got == 0 || errno != EAGAIN;
        return;
    }
    for (ssize_t n = 0; n < got; n++)
        stream_wrong += bytes[n] != pattern(stream_back + n);
    stream_back += got;
    for (ssize_t gone = 0, more; !connects && gone < got; gone += more) {
        more = send(tcp, bytes + gone, got - gone, MSG_NOSIGNAL);
        if (more < 0) {
            broken = 1;
            return;
        }
    }
}

static void print_counts(void)
{
    printf("{\"sent\": %lu, \"received\": %lu, \"twice\": %lu, \"highest\": %lu, \"other_received\": %lu, "
           "\"silence_ms\": %.1f, \"unheard_ms\": %.1f, \"stream_sent\": %lu, \"stream_back\": %lu, "
           "\"stream_wrong\": %lu, \"stream_broken\": %s, \"missing\": [",
           sent, received, twice, highest, others, silence_ns / 1e6, unheard_ns / 1e6, stream_sent,
           stream_back, stream_wrong, broken ? "true" : "false");
    const char *between = "";
    for (uint64_t from = 0, to; received && from <= highest; from = to + 1) {
        for (to = from; to <= highest && !(seen[to / 8] & 1 << to % 8); to++)
            ;
        if (to > from) {
            printf("%s[%lu, %lu]", between, from, to - 1);
            between = ", ";
        }
    }
    printf("]}\n");
    fflush(stdout);
}

int main(int count, char **words)
{
    if (count != 6)
        return 2;
    int connects = !strcmp(words[1], "connect");
    struct sockaddr_in own = address(words[2], words[4]), other = address(words[3], words[4]);
    struct sigaction action = {.sa_handler = on_signal};
    sigaction(SIGUSR1, &action, 0);
    sigaction(SIGUSR2, &action, 0);
    sigaction(SIGTERM, &action, 0);
    int udp = bound(SOCK_DGRAM, own);
    if (connect(udp, (struct sockaddr *)&other, sizeof other))
        fail("connect");
    int tcp;
    if (connects) {
        tcp = connected(own, other);
    } else {
        tcp = bound(SOCK_STREAM, own);
        listen(tcp, 1);
        printf("listening\n");
        fflush(stdout);
        tcp = accept(tcp, 0, 0);
        if (tcp < 0)
            fail("accept");
        printf("connected\n");
        fflush(stdout);
    }
    uint64_t begun = now(CLOCK_MONOTONIC), next = begun;
    while (!ended) {
        struct pollfd ready[] = {{udp, POLLIN, 0}, {broken ? -1 : tcp, POLLIN, 0}};
        poll(ready, 2, 1);
        receive_all(udp);
        if (ready[1].revents)
            stream_in(tcp, connects);
        if (!quiet)
            send_due(udp, &begun, strtoull(words[5], 0, 10));
        if (connects && !quiet && !broken)
            stream_due(tcp, &next);
        if (asked) {
            asked = 0;
            print_counts();
        }
    }
    receive_all(udp);
    print_counts();
    return 0;
}
