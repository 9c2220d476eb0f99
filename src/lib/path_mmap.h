/* SPDX-License-Identifier: Apache-2.0 */
/*
 * path_mmap.h - inside the data path through the mounted files: path_mmap.c (mappings, steps) and
 * path_mmap_params.c (directories, attributes).
 */
#ifndef LIB_PATH_MMAP_H
#define LIB_PATH_MMAP_H

#include "lib/path.h"

/* One mapped state file. */
struct mfile {
	char *rel; /* below the mount */
	uint64_t len;
	char *map; /* NULL: not mapped (empty, or after a rollback until used) */
	int fd;	   /* open and claimed while it is mapped; -1 else */
	uint64_t dirty_from, dirty_to; /* written in this step; from == to: nothing */
};

struct mparam {
	char *rel; /* its directory, below the mount */
	uint32_t file[MOMENT_ROLES];
	bool dead;
};

struct mm {
	struct path path;
	bool readonly;
	int dir;			  /* the mount point */
	int step_fd, hint_fd, control_fd; /* .moment/; -1 when reading only */
	uint64_t open_step;
	struct mfile *file;
	uint32_t n_files;
	struct mparam *param;
	uint32_t n_params;
};

static inline struct mm *mm_of(struct path *p)
{
	return (struct mm *)p;
}

/* A failed call on the mount, told: -ECONNRESET if the daemon is gone. */
int mm_error(struct mm *m, int res, const char *what);
/* Opens a file and claims it; with O_CREAT in flags it is made. */
int mm_open(struct mm *m, const char *rel, int flags, int *fd);
void mm_close_file(struct mm *m, int fd);
/* Whether so many files more can be kept open and mapped. -EMFILE, -ENOMEM with the limit. */
int mm_room_for(struct mm *m, size_t files);
int mm_map(struct mm *m, struct mfile *f);
void mm_unmap(struct mm *m, struct mfile *f);

/* path_mmap_params.c */
int mm_list(struct path *p, path_list_fn *fn, void *arg);
int mm_add(struct path *p, struct path_param *pp, size_t n, uint32_t flags);
int mm_remove(struct path *p, const uint32_t *handles, size_t n);
int mm_steps(struct path *p, const struct moment_param_step *s, size_t n);

#endif
