/* SPDX-License-Identifier: Apache-2.0 */
/*
 * interrupt.c - requests whose caller got a signal while it waits.
 *
 * The kernel sends INTERRUPT for every signal, once for a request, and does not say which signal it
 * was. A host's file system lets only a fatal one end an fsync, a read or a write: a program that
 * has a timer or a handler would else see EINTR where it never expects it (SQLite gives up a
 * transaction, numpy's flush raises). So an interrupted request is only remembered here, and while
 * it is not answered the thread looks every POLL_MS whether its caller is to die: a fatal signal
 * leaves SIGKILL pending for every thread of the process, which /proc shows. Then the op is given up,
 * so that the process can go at once. A caller in a pid namespace that this process cannot see has
 * number 0: it waits for the answer.
 *
 * on_interrupt() runs on a receive thread with libfuse's lock of the request held, so it must not
 * wait. The list and its thread hold a reference of each request in it. Locks: interrupts.lock
 * around the list, then request.lock, never the other way round.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/daemon.h"

#define POLL_MS 100
#define STACK	(256u << 10)

struct interrupts {
	pthread_t thread;
	pthread_mutex_t lock;
	pthread_cond_t wake;
	struct list list; /* struct request.interrupt_link */
	bool stop, fresh; /* fresh: one came that was not looked at yet */
};

#define BIT(sig) (1ull << ((sig)-1))

/* By default these end nobody. */
#define HARMLESS \
	(BIT(SIGCHLD) | BIT(SIGCONT) | BIT(SIGURG) | BIT(SIGWINCH) | BIT(SIGSTOP) | BIT(SIGTSTP) | \
	 BIT(SIGTTIN) | BIT(SIGTTOU))

bool interrupt_is_fatal(pid_t tid)
{
	unsigned long long pending = 0, spared = HARMLESS, v;
	char path[64], line[256];
	FILE *f;

	if (tid <= 0)
		return false;
	snprintf(path, sizeof(path), "/proc/%d/status", (int)tid);
	f = fopen(path, "re");
	if (!f)
		return errno == ENOENT;
	while (fgets(line, sizeof(line), f)) {
		if (sscanf(line, "SigPnd: %llx", &v) == 1 || sscanf(line, "ShdPnd: %llx", &v) == 1)
			pending |= v;
		else if (sscanf(line, "SigBlk: %llx", &v) == 1 ||
			 sscanf(line, "SigIgn: %llx", &v) == 1 ||
			 sscanf(line, "SigCgt: %llx", &v) == 1)
			spared |= v;
	}
	fclose(f);
	return pending & (~spared | BIT(SIGKILL));
}

/* True: nothing more is to be done for it. */
static bool look(struct request *r)
{
	bool done;

	pthread_mutex_lock(&r->lock);
	done = r->ended;
	pthread_mutex_unlock(&r->lock);
	if (done)
		return true;
	return interrupt_is_fatal(r->tid) && request_give_up(r);
}

static void *interrupts_main(void *arg)
{
	struct interrupts *n = arg;

	pthread_mutex_lock(&n->lock);
	while (!n->stop) {
		struct list todo;

		if (list_empty(&n->list)) {
			pthread_cond_wait(&n->wake, &n->lock);
			continue;
		}
		n->fresh = false;
		list_init(&todo);
		list_splice_back(&todo, &n->list);
		pthread_mutex_unlock(&n->lock);
		list_for_each_safe(l, tmp, &todo)
		{
			struct request *r = list_entry(l, struct request, interrupt_link);

			if (!look(r))
				continue;
			list_remove(l);
			request_put(r);
		}
		pthread_mutex_lock(&n->lock);
		list_splice_back(&n->list, &todo);
		if (!list_empty(&n->list) && !n->fresh && !n->stop) {
			struct timespec until;

			clock_gettime(CLOCK_MONOTONIC, &until);
			until.tv_nsec += POLL_MS * 1000000L;
			until.tv_sec += until.tv_nsec / 1000000000L;
			until.tv_nsec %= 1000000000L;
			pthread_cond_timedwait(&n->wake, &n->lock, &until);
		}
	}
	pthread_mutex_unlock(&n->lock);
	return NULL;
}

void interrupts_add(struct interrupts *n, struct request *r)
{
	pthread_mutex_lock(&n->lock);
	if (!n->stop) {
		atomic_fetch_add(&r->refs, 1);
		list_push_back(&n->list, &r->interrupt_link);
		n->fresh = true;
		pthread_cond_signal(&n->wake);
	}
	pthread_mutex_unlock(&n->lock);
}

int interrupts_create(struct daemon *d)
{
	struct interrupts *n = calloc(1, sizeof(*n));
	pthread_condattr_t ca;
	pthread_attr_t ta;
	int res;

	if (!n)
		return -ENOMEM;
	list_init(&n->list);
	pthread_mutex_init(&n->lock, NULL);
	pthread_condattr_init(&ca);
	pthread_condattr_setclock(&ca, CLOCK_MONOTONIC);
	pthread_cond_init(&n->wake, &ca);
	pthread_condattr_destroy(&ca);
	pthread_attr_init(&ta);
	pthread_attr_setstacksize(&ta, STACK);
	res = -pthread_create(&n->thread, &ta, interrupts_main, n);
	pthread_attr_destroy(&ta);
	if (res) {
		free(n);
		return res;
	}
	d->interrupts = n;
	return 0;
}

void interrupts_stop(struct daemon *d)
{
	struct interrupts *n = d->interrupts;

	pthread_mutex_lock(&n->lock);
	n->stop = true;
	pthread_cond_signal(&n->wake);
	pthread_mutex_unlock(&n->lock);
	pthread_join(n->thread, NULL);
	/* What is in the list is answered like any other request, without being given up. */
	while (!list_empty(&n->list)) {
		struct request *r = list_first(&n->list, struct request, interrupt_link);

		list_remove(&r->interrupt_link);
		request_put(r);
	}
}

void interrupts_destroy(struct daemon *d)
{
	struct interrupts *n = d->interrupts;

	pthread_cond_destroy(&n->wake);
	pthread_mutex_destroy(&n->lock);
	free(n);
	d->interrupts = NULL;
}
