/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cache.h - the RAM tier: files cut in blocks, blocks in a few named states, and who may touch
 * them.
 *
 * All of this belongs to the loop thread. Work threads and clients touch a block's memory only
 * while the loop thread has it pinned for them.
 *
 * Life of a block (block_set_state() checks these and no others):
 *
 *	EMPTY	--> READING	somebody wants it, and has memory for it
 *	READING	--> CLEAN	the bytes are there
 *		--> DIRTY	its first writer overwrites all of it
 *		--> EMPTY	the read has failed
 *	CLEAN	--> DIRTY	a writer
 *		--> EMPTY	evicted, or dropped (truncated, deleted, rolled back)
 *	DIRTY	--> WRITING	written back
 *		--> CLEAN	the writer gives it back as it was
 *		--> EMPTY	dropped
 *	WRITING	--> CLEAN	it is on the drive
 *		--> DIRTY	the write has failed
 *
 *	READING	memory is there, content is not: the drive, zeros, or the first writer is filling it
 *	CLEAN	equals the live extent (or is all zeros over a hole)
 *	DIRTY	newer than the live extent; a place to write it to is reserved
 *	WRITING	being hashed and written; nobody may change it, anybody may read it
 *
 * Life of an extent: a block has a live extent (the newest on disk) and may have spares (reserved
 * places). A live extent with seq != 0 is part of a commit, durable or under way, and is never
 * written over: a write goes to a spare and the old one waits in its file's `frees` until a commit
 * that no longer refers to it is durable. With seq == 0 no commit knows it, and it is overwritten in
 * place. So a block needs two places, never three; a kept slot (registered parameter, fallocate)
 * owns both from the start, and a write to it cannot run out of disk.
 */
#ifndef ENGINE_CACHE_H
#define ENGINE_CACHE_H

#include <stdatomic.h>

#include "engine/arena.h"
#include "engine/catalog.h"
#include "engine/io.h"
#include "engine/list.h"
#include "engine/loop.h"
#include "engine/policy.h"
#include "engine/pool.h"
#include "engine/trace.h"
#include "engine/types.h"
#include "engine/u64map.h"

struct cache;
struct commit;

enum block_state { BLOCK_EMPTY, BLOCK_READING, BLOCK_CLEAN, BLOCK_DIRTY, BLOCK_WRITING };

/* Somebody who wants to look again when a block (or the pool) has changed. */
struct waiter {
	struct list link;
	void (*wake)(struct waiter *);
};

struct slot {
	struct extent live;
	uint64_t seq;	      /* the commit that holds `live`; 0: none */
	struct poff spare[2]; /* reserved places */
	uint32_t spare_len;   /* bytes of each */
	uint32_t tail; /* bytes behind `live` that are its place as well: a kept place stays as long */
	uint8_t nspare;
	bool keep;	 /* owns two places for good */
	bool unsure;	 /* a sync has failed since a write of it last began: unsure.c */
	uint32_t acct;	 /* bytes counted in file.bytes */
	struct block *b; /* cached, or NULL */
};

struct freed {
	struct poff off;
	uint32_t len;  /* with the tail */
	uint32_t tail; /* of these, bytes that no commit knows */
	uint32_t n;    /* block number, to give the place back to a kept slot */
	uint64_t ino;
};

struct freed_list {
	struct freed *v;
	size_t n, cap;
};

struct file {
	uint64_t ino;
	uint64_t size;
	uint64_t bytes;	     /* allocated on disk, or to be */
	/* slots.c */
	struct slot first;	  /* slot 0 */
	struct slot **few;	  /* slots 1, 2-3, 4-7, 8-15, 16-31, or NULL */
	void *tree;		  /* the others, or NULL */
	struct slot_leaf *marked; /* those that the next commit looks at */
	uint8_t height;		  /* of the tree, in nodes */
	bool marked_first;	  /* slots 0 to 31 are to be looked at */
	bool untidy;		  /* blocks have become holes: slots may be empty */
	uint32_t cached;     /* blocks in the cache */
	uint32_t dirty;	     /* of these, DIRTY or WRITING */
	bool changed;	     /* since the last freeze: map, content or size */
	bool held;	     /* part of an open or torn step: no commit takes it; in cache.held */
	bool pinned;	     /* tier=ram: its blocks are never evicted */
	bool stepped;	     /* changed in a plain step since the last commit that took it */
	bool touched;	     /* bytes changed through leases since the step began */
	bool lost;	     /* removed, and a rollback has dropped its bytes: -ESTALE for good */
	bool generated;	     /* a meta.json made on read: it has no data, for good */
	uint64_t read_end;   /* of the last plain READ */
	uint32_t read_ahead; /* block up to which plain READs were read ahead */
	struct list changed_link;
	struct list held_link;
	struct freed_list frees;
	struct session *session; /* registered by */
	uint32_t handle;	 /* the session's */
};

struct block {
	struct file *f;
	uint32_t n;
	enum block_state state;
	struct aoff mem;   /* only for block_mem() and who frees it */
	uint32_t piece;	   /* bytes of memory; never less than the live extent has */
	uint32_t pins;	   /* reads, leases and gets under way: not evictable */
	bool writer;	   /* somebody has it for writing */
	bool filler;	   /* READING, and the first writer fills it */
	bool promised;	   /* the writer's caller has been told that its bytes are there: who reads
			      waits */
	bool frozen;	   /* the commit under way needs it as it is */
	bool ahead;	   /* prefetched, not used yet */
	int error;	   /* of the last write, 0: none */
	struct policy_node pol;
	struct list waiters;
	struct list write_link; /* in cache.write_queue */
	struct list error_link; /* in cache.errors: its last write failed */
	/* the read or write under way */
	struct io_op io;
	struct loop_work work;
	struct extent next;
	bool next_spare; /* `next` is spare[0] of the slot */
	struct cache *c;
};

enum get_mode {
	GET_READ,  /* a hole is NULL: want.b == NULL means zeros */
	GET_LEASE, /* to read: a hole gets memory */
	GET_WRITE, /* exclusive; dirty from the grant on */
};

struct want {
	struct file *f;
	uint32_t n;
	enum get_mode mode;
	uint32_t len; /* bytes of the block that must have memory (GET_WRITE of a growing file); 0:
			 what the file's size says */
	uint32_t replaces; /* so many bytes from the block's start the getter replaces: all there
			      are, and nothing need be read */
	bool can_fill;	   /* the getter zeroes what it does not write when `fresh` */
	/* results */
	struct block *b;
	bool fresh; /* memory holds old bytes: zero what you do not write */
	bool was_clean, granted, op;
};

struct get {
	struct want *want;
	unsigned int n;
	bool background; /* may fail with -EAGAIN instead of waiting for memory (prefetch) */
	bool session;	 /* leases: detect that own leases block it, -E2BIG */
	/* -ENOBUFS: never all of these at once while leases are out as they are; one at a time
	 * goes. -E2BIG: the same, for a session's get. */
	void (*done)(struct get *, int res);
	/* the cache's */
	struct cache *c;
	unsigned int i;
	bool pinned; /* memory and pins are held */
	int res;
	unsigned int failed_rounds; /* the cache's, when it was asked */
	struct waiter w;
	struct list link; /* in cache.starving */
};

#define SLOT_LEAF 32u /* slots in a leaf: the blocks of a segment of the map */
#define SLOT_FEW  5u

struct cache_stats {
	uint64_t hits, misses, evictions, prefetches, prefetch_hits, writebacks;
	uint64_t read_errors, write_errors, checksum_errors;
	uint64_t op_read_bytes, op_write_bytes, ops;
};

struct cache {
	struct loop *loop;
	struct io *io;
	struct arena *arena;
	void *base;
	struct pool *pool;
	struct policy *policy;
	struct catalog *cat;
	struct ns *ns;
	uint32_t block;
	bool readonly;

	struct u64map files;	   /* number -> struct file */
	struct list held;	   /* files that are held */
	uint64_t heap;		   /* bytes of heap that files, slots, blocks and freed lists take */
	struct list changed;	   /* files */
	atomic_bool step_names;	   /* plain steps have changed names since the last commit */
	struct freed_list orphans; /* extents of files that are gone */

	struct list woken;		    /* waiters of dropped blocks, woken by the pump */
	struct list starving;		    /* gets that wait for memory, first come first served */
	struct list space;		    /* waiters for pool space */
	struct list write_queue;	    /* blocks to be written, in order */
	unsigned int reading, writing;	    /* blocks */
	uint64_t writing_bytes, write_most; /* of these; the most at once */
	unsigned int op_pins;	    /* pins of ops: they end by themselves, a lease need not */
	struct list errors;	    /* dirty blocks whose last write failed */
	uint32_t error_blocks;	    /* so many */
	unsigned int failed_rounds; /* of writes and retries, since one last succeeded */
	bool round_failed;	    /* this round has been counted */
	int write_error;	    /* of the last write that failed */
	bool pumping, pump_again;
	unsigned int quiet; /* nested; an engine that ends stays quiet */

	/* prefetch: a ring of ranges */
	struct prefetch {
		uint64_t ino;
		uint32_t n, count;
	} * ahead;
	uint32_t ahead_head, ahead_n, ahead_cap;
	uint64_t ahead_bytes, window; /* prefetched and unused; the most */

	/* growth of the pool */
	struct pool_grow grow;
	struct loop_work grow_work;
	bool growing;
	int grow_error;	 /* of the last growth */
	int space_error; /* while waiters for space are woken: why the commit that should give it
			    failed */

	struct loop_timer retry; /* after write errors */

	struct commit *commit; /* see commit.h */
	struct cache_stats stats;
	struct trace *trace;			       /* or NULL */
	uint64_t dirty_bytes; /* memory of blocks that are DIRTY or WRITING */
	uint64_t leased, leased_loose, leased_readers; /* bytes of memory out on leases: all, of
							  files that are not pinned, of readers */

	/* hooks of engine.c */
	void (*report)(void *arg, int err, uint64_t ino, uint64_t off, uint64_t len,
		       const char *what);
	int (*intact)(void *arg); /* -EIO: a file of the backing has been taken away */
	void *arg;
};

int cache_init(struct cache *c); /* after loop .. block are set */
void cache_fini(struct cache *c);

/* ---- file.c: files, slots, extents ---- */
struct file *file_find(struct cache *c, uint64_t ino);
struct file *file_get(
	struct cache *c,
	uint64_t ino); /* makes it from the namespace's size; NULL: gone or no memory */
void file_free(struct cache *c, struct file *f);
void files_fini(struct cache *c); /* with their blocks; nothing is in flight any more */
struct file *file_next(struct cache *c, size_t *pos); /* all of them, in no order; from 0 on */
int file_load_map(struct cache *c, struct file *f, const struct map_copy *map, uint64_t seq);
uint64_t file_size_max(const struct cache *c); /* by what a map can hold */
uint32_t file_nblocks(const struct cache *c, const struct file *f);
uint32_t file_content(const struct cache *c, const struct file *f,
		      uint32_t n); /* bytes of block n by the file's size */
void file_changed(struct cache *c, struct file *f); /* its size, or any of its blocks */
void file_hold(struct cache *c, struct file *f, bool held);	/* in or out of an open step */
bool slot_has_content(const struct slot *s); /* or is a hole */
void slot_account(struct cache *c, struct file *f, uint32_t n); /* after a change: file.bytes */
void file_publish(struct cache *c, struct file *f, bool touch);
/*
 * The directory gets its generated meta.json. If an ordinary file has the name, it becomes the
 * generated one and loses its data: its size in the namespace, its blocks and its places go in one
 * instant, so that a commit sees all of it or nothing. 1: a block of it is busy, `w` will be woken,
 * ask again then. -EBUSY: it is open for writing.
 */
int file_make_meta(struct cache *c, uint64_t dir, struct waiter *w);

/* Makes sure that a write of `len` bytes of this block has a place. 0, -EAGAIN (no room in the pool
 * as it is: space_wait), -EBUSY (the block is being written: block_wait). */
int slot_reserve(struct cache *c, struct file *f, struct slot *s, uint32_t len);
/* Reserves so that there are two places with the live one, for good. Same results. */
int slot_keep(struct cache *c, struct file *f, struct slot *s, uint32_t len);
/* Bytes of the place that the live extent is in. */
static inline uint32_t slot_place_len(const struct slot *s)
{
	return s->live.len + s->tail;
}

/* Of these two, how many are there already. */
unsigned int slot_places(const struct slot *s, uint32_t len);
/* Gives back its spares and keeps none from now on: nothing is written any more. */
void slot_give_up(struct cache *c, struct slot *s);
/* Gives back spares that are not needed. */
void slot_trim(struct cache *c, struct slot *s);
/*
 * A write of block n is on disk: `e` is the live extent now (from spare[0], or in place). What it
 * replaced is freed: now if no commit knows it, else with `frees`.
 */
void slot_written(struct cache *c, struct file *f, struct slot *s, uint32_t n,
		  const struct extent *e, bool from_spare, struct freed_list *frees);
/* The live extent is no longer: freed now, or after the next commit that covers the file. The slot
 * becomes a hole. */
void slot_drop_live(struct cache *c, struct file *f, struct slot *s, uint32_t n);
void freed_push(struct cache *c, struct freed_list *l, struct freed f);
void freed_move(struct cache *c, struct freed_list *to, struct freed_list *from);
void freed_fini(struct cache *c, struct freed_list *l);
/* A live extent that a map has just brought back has its tail again, if the slot keeps places. */
void slot_take_tail(struct cache *c, struct slot *s, uint32_t tail);
/* An extent's freeing is durable: back to its kept slot or to the pool. */
void freed_release(struct cache *c, const struct freed *fr);

/* ---- space.c: room in the pool ---- */
/* Waits for pool space: starts a growth or a commit. -ENOSPC: neither can help. `kept`: wait for a
 * running commit rather than grow. */
int space_wait(struct cache *c, struct waiter *w, uint32_t len, bool kept);
int space_grow(struct cache *c, uint64_t need); /* 0: started or under way; -ENOSPC */
void space_wake(struct cache *c);
/*
 * Whether `need` more bytes of places can be had at all: from the pool, the limit and the host,
 * after a commit if need be. 0; 1: not known yet, `w` is woken, ask again with the same `waits` (0
 * at first); -ENOSPC. To be asked before the first place of many is taken.
 */
int space_check(struct cache *c, struct waiter *w, uint64_t need, unsigned int *waits);
/* Gives the free tail of the pool back to the host, down to a size of `floor`. True: under way,
 * c->space is woken; false: there is none, or not now. */
bool space_trim(struct cache *c, uint64_t floor);
/*
 * Gives every block of the registered files two places, by dealing out anew those that nothing is
 * written to yet. -ENOSPC: the pool as it is has no room for them; -ENOMEM. All is as before then.
 */
int space_repack(struct cache *c);
/* Has the pool grow, if it can, so that state with places of up to `longest` bytes will find them
 * again when the disk is full. */
void space_keep_slack(struct cache *c, uint32_t longest);
/* Gives the free tail back at the end, at once: nothing is asked for any more, so no place is kept for a next
 * write. Returns the bytes. */
uint64_t space_trim_all(struct cache *c);

/* ---- slots.c: a file's slots by number ---- */
struct slot *file_slot(struct file *f, uint32_t n); /* NULL: never touched */
struct slot *file_slot_next(struct file *f,
			    uint32_t *n); /* the first that was touched, from *n on */
struct slot *file_slot_make(struct cache *c, struct file *f, uint32_t n); /* NULL: no memory */
uint32_t file_map_len(struct file *f); /* entries that a map up to the last block with data has */
/* A commit has to look at block n: what it would record of it is another now, or will be. */
void slot_changed(struct cache *c, struct file *f, uint32_t n);
void file_changed_all(struct cache *c, struct file *f); /* at all blocks */
/* The marked segments: how many, and which, in order. */
uint32_t slots_marked(const struct file *f);
void slots_marked_get(const struct file *f, uint32_t *segs);
/* They have been taken; but those that have data in block n or behind it stay marked. */
void slots_unmark(struct file *f, uint32_t n);
void slots_tidy(struct cache *c, struct file *f); /* frees leaves of slots that are all empty */
void slots_fini(struct cache *c, struct file *f);

/* ---- block.c ---- */
const char *block_state_name(enum block_state s);
void block_set_state(struct block *b, enum block_state s);
/*
 * Tells the policy what can be done with the block now. To be called when anything that this
 * follows from has changed: state, pins, writer, frozen, ahead, error, being queued to be written,
 * its file being pinned.
 */
void block_mark(struct block *b);
unsigned int block_marks(const struct block *b); /* what they should be */
void block_unqueue(struct block *b);		 /* it is not to be written any more */
void file_pin(struct file *f, bool pinned);	 /* tier=ram or not */
void block_wait(struct block *b, struct waiter *w);
void block_wake(struct block *b);
bool block_busy(const struct block *
			b); /* pinned, filling, writing, frozen: cannot be changed or dropped now */
void block_drop(struct block *b);		 /* not busy; content is lost, memory freed */
uint32_t block_write_len(const struct block *b); /* bytes that a write-back writes */
/*
 * Where bytes in .. in + len - 1 of the block are in memory; NULL if its piece does not hold all of
 * them. Whoever touches a block's memory gets it here, so nothing is read or written past a piece,
 * which is another block's memory. NULL is a bug: the caller gives up with block_outside().
 */
void *block_mem(const struct block *b, uint64_t in, uint64_t len);
/* Loop thread: a line in the log and in status; -EIO, for whoever asked. */
int block_outside(const struct block *b, uint64_t in, uint64_t len);

struct block *block_new(struct cache *c, struct file *f, struct slot *s, uint32_t n);
void block_remove(struct block *b, bool evicted); /* nobody uses or awaits it */
void block_free(struct cache *c, struct block *b); /* its structure, at the very end; or NULL */
/*
 * To drop blocks they must be idle, and stay so until they are dropped. So both happen in one quiet
 * section (cache_quiet() .. cache_loud()), in which nothing starts: file_settle() looks, and what
 * it found holds until cache_loud(). Whoever has to wait for a block leaves the section, and looks
 * at everything again when woken.
 *
 * True: blocks n .. stop - 1 are idle. What was only queued to be written is not any more, what a
 * commit waits for is written now. False: one is busy all the same; `w` is woken when it has
 * changed.
 */
bool file_settle(struct cache *c, struct file *f, uint32_t n, uint32_t stop, struct waiter *w);
/* Blocks n .. stop - 1, settled, become holes; with `keep` they keep their places. */
void file_holes(struct cache *c, struct file *f, uint32_t n, uint32_t stop, bool keep);
void file_unkeep(struct cache *c, struct file *f,
		 uint32_t n); /* from block n on, no second place any more */

/* ---- cache.c: who gets blocks ---- */
/* Asks for blocks; done() runs on the loop thread, maybe at once. All or nothing. */
void cache_get(struct cache *c, struct get *g);
/* True: it was waiting for memory, or for a block that must move to grow; done() will not be called.
 */
bool cache_get_cancel(struct cache *c, struct get *g);
/*
 * The writer will fill what it was granted and nothing can keep it from it: from here on the block
 * counts as written, for reads, commits and the file's size on disk; they wait for cache_put().
 */
void cache_promise(struct cache *c, struct want *w);
/* Gives one back. changed: for writers; false: the memory was not changed. */
void cache_put(struct cache *c, struct want *w, bool changed);
/* Between these, nothing is woken and nothing starts: for changes of several blocks at once. Nests.
 */
void cache_quiet(struct cache *c);
void cache_loud(struct cache *c);
void cache_pump(struct cache *c); /* serves who waits for memory, reads ahead, writes back */
bool cache_fill_ahead(struct cache *c, struct file *f, uint32_t n);
uint32_t cache_piece(const struct cache *c, uint32_t len);

/* ---- readahead.c: hints ---- */
int readahead_init(struct cache *c);
void readahead_fini(struct cache *c);
void readahead_pump(struct cache *c);
void cache_prefetch(struct cache *c, uint64_t ino, uint32_t n, uint32_t count);
void cache_prefetch_clear(struct cache *c);
void cache_prefetch_reached(struct cache *c, uint64_t ino, uint32_t n); /* block n is used now */

/* ---- blockio.c: reading and writing blocks ---- */
void block_fill(struct block *b, bool urgent);	/* READING: from the live extent, or zeros */
void block_write(struct block *b, bool urgent); /* DIRTY and nobody writes to it: queue its write */
void block_write_pump(struct cache *c);

#endif
