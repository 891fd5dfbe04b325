/* Owns two pretend hosts and the wire between them: for tests of several hosts on one machine whose kernel has no netem.

   wire DELAY_US MBIT_PER_S ADDRESS_A ADDRESS_B

   A host is a network, a name and a process namespace; nothing of it has a name outside, so nothing can be left behind. Its first
   process dies with this one, and takes all others of the host with it. Packets go through one TUN device in each, which this program
   reads and writes: each waits for those before it (bandwidth), then for the delay. Prints the process ids of the hosts. Then reads
   commands, and answers each with a line:  drop | join | bytes | kill HOST | boot HOST.  It ends with its standard input. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MTU = 9000, SLOTS = 2048 };

typedef struct {
  int in, out;
  unsigned head, tail; /* packets that came, and that went on */
  long due[SLOTS], free_at, bytes;
  int size[SLOTS];
  char data[SLOTS][MTU];
} Way;

static long delay_ns, now;
static double ns_per_byte;
static int dropped;
static Way ways[2];

typedef struct {
  int net, names, tun;
  pid_t init;
} Host;

static void fail(const char *what) {
  perror(what);
  exit(1);
}

static long clock_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000L + t.tv_nsec;
}

static void up(int socket, struct ifreq *request) {
  if (ioctl(socket, SIOCGIFFLAGS, request)) fail("flags of a device");
  request->ifr_flags |= IFF_UP;
  if (ioctl(socket, SIOCSIFFLAGS, request)) fail("a device that is up");
}

static void address(int socket, struct ifreq *request, const char *text, int what) {
  struct sockaddr_in *into = (struct sockaddr_in *)&request->ifr_addr;
  memset(into, 0, sizeof *into);
  into->sin_family = AF_INET;
  inet_pton(AF_INET, text, &into->sin_addr);
  if (ioctl(socket, what, request)) fail(text);
}

static int kept(const char *space) {
  int f = open(space, O_RDONLY | O_CLOEXEC);
  if (f < 0) fail(space);
  return f;
}

/* The first process of a host, of whose networks and names this one is. */
static void boot(Host *host) {
  int home = kept("/proc/self/ns/pid");
  if (setns(host->net, CLONE_NEWNET) || setns(host->names, CLONE_NEWUTS) || unshare(CLONE_NEWPID)) fail("process ids");
  if ((host->init = fork()) < 0) fail("fork");
  if (!host->init) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int f = 0; f < 64; f++) close(f);
    signal(SIGCHLD, SIG_IGN); /* whoever lost its parent is reaped */
    for (;;) pause();
  }
  if (setns(home, CLONE_NEWPID)) fail("the process ids from before"); /* the next host's are beside, not inside */
  close(home);
}

/* Make a host. This process is in its network, and has its name, until the next is made. */
static void make(Host *host, const char *name, const char *own) {
  if (unshare(CLONE_NEWNET | CLONE_NEWUTS)) fail("namespaces");
  if (sethostname(name, strlen(name))) fail("a host's name");
  host->net = kept("/proc/self/ns/net");
  host->names = kept("/proc/self/ns/uts");
  int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC), s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq request = {.ifr_flags = IFF_TUN | IFF_NO_PI};
  strcpy(request.ifr_name, "wire0");
  if (tun < 0 || s < 0 || ioctl(tun, TUNSETIFF, &request)) fail("/dev/net/tun");
  address(s, &request, own, SIOCSIFADDR);
  address(s, &request, "255.255.255.0", SIOCSIFNETMASK);
  request.ifr_mtu = MTU;
  if (ioctl(s, SIOCSIFMTU, &request)) fail("mtu");
  up(s, &request);
  struct ifreq loopback = {.ifr_name = "lo"};
  up(s, &loopback);
  close(s);
  host->tun = tun;
  boot(host);
}

static void take(Way *way) {
  for (;;) {
    char spare[MTU];
    int is_full = way->head - way->tail == SLOTS;
    unsigned slot = way->head % SLOTS;
    ssize_t n = read(way->in, is_full ? spare : way->data[slot], MTU);
    if (n <= 0) return;
    if (is_full || dropped) continue;
    if (way->free_at < now) way->free_at = now;
    way->free_at += (long)(n * ns_per_byte);
    way->due[slot] = way->free_at + delay_ns;
    way->size[slot] = (int)n;
    way->bytes += n;
    way->head++;
  }
}

static long give(Way *way, long next) {
  for (; way->tail != way->head; way->tail++) {
    unsigned slot = way->tail % SLOTS;
    if (way->due[slot] > now) return way->due[slot] < next ? way->due[slot] : next;
    if (!dropped && write(way->out, way->data[slot], way->size[slot]) < 0) continue; /* a host that is gone */
  }
  return next;
}

static int obey(Host *hosts) {
  char line[64];
  ssize_t n = read(0, line, sizeof line - 1);
  if (n <= 0) return 0;
  line[n] = 0;
  Host *named = &hosts[n > 5 && line[5] == '1'];
  if (!strncmp(line, "drop", 4)) dropped = 1;
  else if (!strncmp(line, "join", 4)) dropped = 0;
  else if (!strncmp(line, "kill", 4)) kill(named->init, SIGKILL);
  else if (!strncmp(line, "boot", 4)) {
    kill(named->init, SIGKILL);
    waitpid(named->init, NULL, 0); /* all of its processes are gone then */
    boot(named);
    printf("%d\n", named->init);
    fflush(stdout);
    return 1;
  }
  printf("%ld %ld\n", ways[0].bytes, ways[1].bytes);
  fflush(stdout);
  return 1;
}

int main(int count, char **words) {
  if (count != 5) return 2;
  delay_ns = atol(words[1]) * 1000;
  ns_per_byte = 8000.0 / atof(words[2]);
  Host hosts[2];
  make(&hosts[0], "hosta", words[3]);
  make(&hosts[1], "hostb", words[4]);
  int a = hosts[0].tun, b = hosts[1].tun;
  ways[0].in = ways[1].out = a;
  ways[1].in = ways[0].out = b;
  signal(SIGPIPE, SIG_IGN);
  printf("%d %d\n", hosts[0].init, hosts[1].init);
  fflush(stdout);
  struct pollfd ready[3] = {{a, POLLIN, 0}, {b, POLLIN, 0}, {0, POLLIN, 0}};
  for (;;) {
    now = clock_ns();
    take(&ways[0]);
    take(&ways[1]);
    now = clock_ns();
    long next = give(&ways[1], give(&ways[0], now + 1000000000L)) - now;
    struct timespec wait = {next / 1000000000L, next % 1000000000L};
    if (ppoll(ready, 3, &wait, NULL) > 0 && ready[2].revents && !obey(hosts)) return 0;
  }
}
