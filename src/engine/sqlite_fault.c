/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sqlite_fault.c - see sqlite_fault.h. Calls go through to the default VFS at once, so what SQLite
 * reads is what it wrote; beside that sqlite_fault_track.c knows what of each file would
 * survive, which a cut then writes to the file.
 */
#include "engine/sqlite_fault.h"

#include <errno.h>
#include <pthread.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "engine/io_fault_spec.h"
#include "engine/io_impl.h"
#include "engine/sqlite_fault_impl.h"

struct sqlite_fault {
	sqlite3_vfs vfs; /* first: SQLite hands it back */
	sqlite3_vfs *inner;
	char *name;
	pthread_mutex_t lock;
	struct fault_spec spec;
	uint64_t rng;
	uint64_t writes, writes_at_set;
	bool is_cut;
	bool dead;		   /* as is_cut for all calls, but the files are as they were */
	unsigned int syncs_to_die; /* 0: none */
	int last_errno; /* of the last failure; as errno, a success leaves it alone */
	struct list files;
};

struct fault_file {
	sqlite3_file base; /* first */
	struct sqlite_fault *f;
	struct tracked *t; /* NULL: a temporary file without a name */
	bool syncs_dir;	   /* a journal or WAL: its first sync is one of the directory too */
	sqlite3_file inner[];
};

static sqlite3_file *inner_of(sqlite3_file *file)
{
	return ((struct fault_file *)file)->inner;
}

/* --- faults --------------------------------------------------------------------------------- */

static bool chance(struct sqlite_fault *f, double rate)
{
	return rate > 0 && (double)(fault_random(&f->rng) >> 11) * 0x1p-53 < rate;
}

static void cut(struct sqlite_fault *f, uint64_t seed)
{
	if (f->is_cut)
		return;
	fault_seed(&f->rng, seed);
	f->is_cut = true;
	tracked_cut(&f->files, &f->rng);
}

static int fail(struct sqlite_fault *f, int err, int rc)
{
	f->last_errno = errno = err;
	return err == ENOSPC && rc == SQLITE_IOERR_WRITE ? SQLITE_FULL : rc;
}

/* A call went to the inner VFS. */
static int passed(struct sqlite_fault *f, int rc)
{
	if (rc != SQLITE_OK)
		f->last_errno = errno;
	return rc;
}

static bool armed(const struct sqlite_fault *f)
{
	struct stat st;

	return !f->spec.file[0] || stat(f->spec.file, &st) == 0;
}

static void delay(const struct fault_kind *k)
{
	struct timespec t = {(time_t)(k->delay_ns / 1000000000u),
			     (long)(k->delay_ns % 1000000000u)};

	nanosleep(&t, NULL);
}

/* Before a call of kind `call`: SQLITE_OK, or the code to fail with. */
static int before(struct sqlite_fault *f, enum io_call call, int rc)
{
	const struct fault_kind *k = &f->spec.kind[call];

	if (f->is_cut || f->dead)
		return fail(f, EIO, rc);
	if (call == IO_CALL_SYNC && f->syncs_to_die && --f->syncs_to_die == 0) {
		f->dead = true;
		return fail(f, EIO, rc);
	}
	if (!armed(f))
		return SQLITE_OK;
	if (chance(f, k->delay))
		delay(k);
	return chance(f, k->error) ? fail(f, k->errnum, rc) : SQLITE_OK;
}

/* --- methods of a file ------------------------------------------------------------------------ */

static int file_close(sqlite3_file *file)
{
	struct fault_file *ff = (struct fault_file *)file;
	int rc = ff->inner->pMethods ? ff->inner->pMethods->xClose(ff->inner) : SQLITE_OK;

	pthread_mutex_lock(&ff->f->lock);
	if (ff->t) {
		ff->t->opens--;
		tracked_put(ff->t);
	}
	pthread_mutex_unlock(&ff->f->lock);
	return rc;
}

static int file_read(sqlite3_file *file, void *buf, int len, sqlite3_int64 off)
{
	struct fault_file *ff = (struct fault_file *)file;
	struct sqlite_fault *f = ff->f;
	int rc;

	pthread_mutex_lock(&f->lock);
	rc = before(f, IO_CALL_READ, SQLITE_IOERR_READ);
	if (rc == SQLITE_OK && armed(f) && chance(f, f->spec.kind[IO_CALL_READ].shorten))
		rc = fail(f, EIO, SQLITE_IOERR_READ);
	if (rc == SQLITE_OK)
		rc = passed(f, ff->inner->pMethods->xRead(ff->inner, buf, len, off));
	if (rc == SQLITE_OK && armed(f) && chance(f, f->spec.kind[IO_CALL_READ].flip)) {
		uint64_t bit = fault_random(&f->rng) % ((uint64_t)len * 8);

		((uint8_t *)buf)[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	pthread_mutex_unlock(&f->lock);
	return rc;
}

static int write_through(struct fault_file *ff, const void *buf, int len, sqlite3_int64 off)
{
	int rc = passed(ff->f, ff->inner->pMethods->xWrite(ff->inner, buf, len, off));

	if (rc == SQLITE_OK && ff->t)
		tracked_write(ff->t, (uint64_t)off, buf, (uint64_t)len);
	return rc;
}

static int file_write(sqlite3_file *file, const void *buf, int len, sqlite3_int64 off)
{
	struct fault_file *ff = (struct fault_file *)file;
	struct sqlite_fault *f = ff->f;
	const struct fault_kind *k = &f->spec.kind[IO_CALL_WRITE];
	uint8_t *flipped = NULL;
	int rc;

	pthread_mutex_lock(&f->lock);
	rc = before(f, IO_CALL_WRITE, SQLITE_IOERR_WRITE);
	if (rc != SQLITE_OK)
		goto out_unlock;
	if (armed(f) && chance(f, k->shorten)) {
		int part = (int)(fault_random(&f->rng) % (uint64_t)len);

		/* As a full disk does: some bytes, then none. */
		if (part)
			write_through(ff, buf, part, off);
		rc = fail(f, ENOSPC, SQLITE_IOERR_WRITE);
		goto out_unlock;
	}
	if (armed(f) && chance(f, k->flip) && (flipped = malloc((size_t)len))) {
		uint64_t bit = fault_random(&f->rng) % ((uint64_t)len * 8);

		memcpy(flipped, buf, (size_t)len);
		flipped[bit / 8] ^= (uint8_t)(1u << bit % 8);
	}
	rc = write_through(ff, flipped ? flipped : buf, len, off);
	f->writes++;
	if (f->spec.cut && f->writes - f->writes_at_set >= f->spec.cut_after) {
		cut(f, f->spec.seed);
		rc = fail(f, EIO, SQLITE_IOERR_WRITE);
	}
out_unlock:
	pthread_mutex_unlock(&f->lock);
	free(flipped);
	return rc;
}

static int file_truncate(sqlite3_file *file, sqlite3_int64 size)
{
	struct fault_file *ff = (struct fault_file *)file;
	int rc;

	pthread_mutex_lock(&ff->f->lock);
	rc = before(ff->f, IO_CALL_WRITE, SQLITE_IOERR_TRUNCATE);
	if (rc == SQLITE_OK)
		rc = passed(ff->f, ff->inner->pMethods->xTruncate(ff->inner, size));
	if (rc == SQLITE_OK && ff->t)
		tracked_truncate(ff->t, (uint64_t)size);
	pthread_mutex_unlock(&ff->f->lock);
	return rc;
}

static int file_sync(sqlite3_file *file, int flags)
{
	struct fault_file *ff = (struct fault_file *)file;
	struct sqlite_fault *f = ff->f;
	struct tracked *t = ff->t;
	int rc;

	pthread_mutex_lock(&f->lock);
	rc = before(f, IO_CALL_SYNC, SQLITE_IOERR_FSYNC);
	if (rc == SQLITE_OK)
		rc = passed(f, ff->inner->pMethods->xSync(ff->inner, flags));
	if (rc == SQLITE_OK && t) {
		tracked_sync(t);
		if (ff->syncs_dir)
			tracked_dirsync(&f->files);
		ff->syncs_dir = false;
	} else if (t && !f->dead) {
		tracked_doubt(t);
	}
	pthread_mutex_unlock(&f->lock);
	return rc;
}

static int file_size(sqlite3_file *file, sqlite3_int64 *size)
{
	return inner_of(file)->pMethods->xFileSize(inner_of(file), size);
}

static int file_lock(sqlite3_file *file, int level)
{
	return inner_of(file)->pMethods->xLock(inner_of(file), level);
}

static int file_unlock(sqlite3_file *file, int level)
{
	return inner_of(file)->pMethods->xUnlock(inner_of(file), level);
}

static int file_check_lock(sqlite3_file *file, int *out)
{
	return inner_of(file)->pMethods->xCheckReservedLock(inner_of(file), out);
}

static int file_control(sqlite3_file *file, int op, void *arg)
{
	/* Hints to allocate or truncate would go past the journal: they are optional. */
	if (op == SQLITE_FCNTL_SIZE_HINT || op == SQLITE_FCNTL_CHUNK_SIZE)
		return SQLITE_NOTFOUND;
	return inner_of(file)->pMethods->xFileControl(inner_of(file), op, arg);
}

static int file_sector_size(sqlite3_file *file)
{
	(void)file;
	return FAULT_SECTOR;
}

static int file_characteristics(sqlite3_file *file)
{
	/* No promise that a drive need not keep, above all not "power-safe overwrite". */
	(void)file;
	return 0;
}

static int file_shm_map(sqlite3_file *file, int page, int size, int extend, void volatile **out)
{
	return inner_of(file)->pMethods->xShmMap(inner_of(file), page, size, extend, out);
}

static int file_shm_lock(sqlite3_file *file, int off, int n, int flags)
{
	return inner_of(file)->pMethods->xShmLock(inner_of(file), off, n, flags);
}

static void file_shm_barrier(sqlite3_file *file)
{
	inner_of(file)->pMethods->xShmBarrier(inner_of(file));
}

static int file_shm_unmap(sqlite3_file *file, int remove)
{
	return inner_of(file)->pMethods->xShmUnmap(inner_of(file), remove);
}

static const sqlite3_io_methods file_methods = {
	.iVersion = 2, /* no mapped reads: they would pass by */
	.xClose = file_close,
	.xRead = file_read,
	.xWrite = file_write,
	.xTruncate = file_truncate,
	.xSync = file_sync,
	.xFileSize = file_size,
	.xLock = file_lock,
	.xUnlock = file_unlock,
	.xCheckReservedLock = file_check_lock,
	.xFileControl = file_control,
	.xSectorSize = file_sector_size,
	.xDeviceCharacteristics = file_characteristics,
	.xShmMap = file_shm_map,
	.xShmLock = file_shm_lock,
	.xShmBarrier = file_shm_barrier,
	.xShmUnmap = file_shm_unmap,
};

/* --- methods of the VFS ----------------------------------------------------------------------- */

static int vfs_open(sqlite3_vfs *vfs, const char *path, sqlite3_file *file, int flags, int *out)
{
	struct sqlite_fault *f = (struct sqlite_fault *)vfs;
	struct fault_file *ff = (struct fault_file *)file;
	struct stat st;
	bool exists;
	int rc;

	file->pMethods = NULL;
	ff->f = f;
	ff->t = NULL;
	ff->inner->pMethods = NULL;
	pthread_mutex_lock(&f->lock);
	if (f->is_cut || f->dead) {
		rc = fail(f, EIO, SQLITE_CANTOPEN);
		goto out_unlock;
	}
	exists = path && stat(path, &st) == 0;
	rc = passed(f, f->inner->xOpen(f->inner, path, ff->inner, flags, out));
	if (rc != SQLITE_OK)
		goto out_unlock;
	file->pMethods = &file_methods;
	/* SQLite's own VFS does so too, whether or not the file is new. */
	ff->syncs_dir = flags & SQLITE_OPEN_CREATE && flags & (SQLITE_OPEN_WAL | SQLITE_OPEN_MAIN_JOURNAL |
					    SQLITE_OPEN_SUPER_JOURNAL);
	if (path && !(flags & SQLITE_OPEN_DELETEONCLOSE)) {
		ff->t = tracked_get(&f->files, path, exists);
		if (!exists)
			tracked_made(ff->t);
		ff->t->opens++;
	}
out_unlock:
	pthread_mutex_unlock(&f->lock);
	return rc;
}

static int vfs_delete(sqlite3_vfs *vfs, const char *path, int sync_dir)
{
	struct sqlite_fault *f = (struct sqlite_fault *)vfs;
	struct tracked *t;
	struct stat st;
	int rc = SQLITE_IOERR_DELETE;

	pthread_mutex_lock(&f->lock);
	if (f->is_cut || f->dead) {
		rc = fail(f, EIO, SQLITE_IOERR_DELETE);
		goto out_unlock;
	}
	t = stat(path, &st) == 0 ? tracked_get(&f->files, path, true) : NULL;
	rc = passed(f, f->inner->xDelete(f->inner, path, sync_dir));
	if (rc == SQLITE_OK && t)
		tracked_removed(t);
	if (rc == SQLITE_OK && sync_dir)
		tracked_dirsync(&f->files);
out_unlock:
	pthread_mutex_unlock(&f->lock);
	return rc;
}

static int vfs_last_error(sqlite3_vfs *vfs, int len, char *buf)
{
	struct sqlite_fault *f = (struct sqlite_fault *)vfs;
	int err;

	(void)len;
	(void)buf;
	pthread_mutex_lock(&f->lock);
	err = f->last_errno;
	pthread_mutex_unlock(&f->lock);
	return err;
}

static int vfs_access(sqlite3_vfs *vfs, const char *path, int flags, int *out)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xAccess(inner, path, flags, out);
}

static int vfs_full_pathname(sqlite3_vfs *vfs, const char *path, int len, char *out)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xFullPathname(inner, path, len, out);
}

static int vfs_randomness(sqlite3_vfs *vfs, int len, char *out)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xRandomness(inner, len, out);
}

static int vfs_sleep(sqlite3_vfs *vfs, int us)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xSleep(inner, us);
}

static int vfs_current_time(sqlite3_vfs *vfs, double *out)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xCurrentTime(inner, out);
}

static int vfs_current_time64(sqlite3_vfs *vfs, sqlite3_int64 *out)
{
	sqlite3_vfs *inner = ((struct sqlite_fault *)vfs)->inner;

	return inner->xCurrentTimeInt64(inner, out);
}

/* --- from outside --------------------------------------------------------------------------- */

int sqlite_fault_create(const char *name, struct sqlite_fault **out)
{
	struct sqlite_fault *f;

	if (sqlite3_vfs_find(name))
		return -EEXIST;
	f = calloc(1, sizeof(*f));
	if (!f || !(f->name = strdup(name))) {
		free(f);
		return -ENOMEM;
	}
	pthread_mutex_init(&f->lock, NULL);
	list_init(&f->files);
	fault_seed(&f->rng, 0);
	f->inner = sqlite3_vfs_find(NULL);
	f->vfs = (sqlite3_vfs){
		.iVersion = 2,
		.szOsFile = (int)sizeof(struct fault_file) + f->inner->szOsFile,
		.mxPathname = f->inner->mxPathname,
		.zName = f->name,
		.xOpen = vfs_open,
		.xDelete = vfs_delete,
		.xAccess = vfs_access,
		.xFullPathname = vfs_full_pathname,
		.xRandomness = vfs_randomness,
		.xSleep = vfs_sleep,
		.xCurrentTime = vfs_current_time,
		.xGetLastError = vfs_last_error,
		.xCurrentTimeInt64 = vfs_current_time64,
	};
	if (sqlite3_vfs_register(&f->vfs, 0) != SQLITE_OK) {
		sqlite_fault_destroy(f);
		return -ENOMEM;
	}
	*out = f;
	return 0;
}

void sqlite_fault_destroy(struct sqlite_fault *f)
{
	if (!f)
		return;
	sqlite3_vfs_unregister(&f->vfs);
	tracked_forget_all(&f->files);
	pthread_mutex_destroy(&f->lock);
	free(f->name);
	free(f);
}

int sqlite_fault_set(struct sqlite_fault *f, const char *spec, char *why, size_t why_len)
{
	struct fault_spec parsed = {0};
	char ignored[1];
	int res;

	res = io_fault_spec_parse(spec, &parsed, why ? why : ignored, why ? why_len : 1);
	if (res < 0)
		return res;
	pthread_mutex_lock(&f->lock);
	f->spec = parsed;
	f->writes_at_set = f->writes;
	fault_seed(&f->rng, parsed.seed);
	pthread_mutex_unlock(&f->lock);
	return 0;
}

void sqlite_fault_cut(struct sqlite_fault *f, uint64_t seed)
{
	pthread_mutex_lock(&f->lock);
	cut(f, seed);
	pthread_mutex_unlock(&f->lock);
}

void sqlite_fault_die_in_sync(struct sqlite_fault *f, unsigned int n)
{
	pthread_mutex_lock(&f->lock);
	f->syncs_to_die = n;
	pthread_mutex_unlock(&f->lock);
}

void sqlite_fault_die(struct sqlite_fault *f)
{
	pthread_mutex_lock(&f->lock);
	f->dead = true;
	pthread_mutex_unlock(&f->lock);
}

bool sqlite_fault_is_dead(struct sqlite_fault *f)
{
	bool dead;

	pthread_mutex_lock(&f->lock);
	dead = f->dead;
	pthread_mutex_unlock(&f->lock);
	return dead;
}

void sqlite_fault_revive(struct sqlite_fault *f)
{
	pthread_mutex_lock(&f->lock);
	f->dead = false;
	f->syncs_to_die = 0;
	f->spec = (struct fault_spec){0};
	pthread_mutex_unlock(&f->lock);
}

bool sqlite_fault_is_cut(struct sqlite_fault *f)
{
	bool is_cut;

	pthread_mutex_lock(&f->lock);
	is_cut = f->is_cut;
	pthread_mutex_unlock(&f->lock);
	return is_cut;
}

void sqlite_fault_restore(struct sqlite_fault *f)
{
	pthread_mutex_lock(&f->lock);
	f->is_cut = f->dead = false;
	f->syncs_to_die = 0;
	f->spec = (struct fault_spec){0};
	tracked_forget_all(&f->files);
	pthread_mutex_unlock(&f->lock);
}

void sqlite_fault_dirsync(struct sqlite_fault *f)
{
	pthread_mutex_lock(&f->lock);
	tracked_dirsync(&f->files);
	pthread_mutex_unlock(&f->lock);
}

uint64_t sqlite_fault_writes(struct sqlite_fault *f)
{
	uint64_t n;

	pthread_mutex_lock(&f->lock);
	n = f->writes;
	pthread_mutex_unlock(&f->lock);
	return n;
}
