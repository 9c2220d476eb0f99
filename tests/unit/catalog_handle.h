/* SPDX-License-Identifier: Apache-2.0 */
/*
 * catalog_handle.h - the engine's own SQLite connection, for tests that make it read from a drive
 * that fails: between sqlite3_auto_extension(note_db) and its cancelling, whoever opens one is
 * noted.
 */
#ifndef CATALOG_HANDLE_H
#define CATALOG_HANDLE_H

#include <sqlite3.h>

struct sqlite3_api_routines;

static sqlite3 *catalog_db;

static int note_db(sqlite3 *db, char **err, const struct sqlite3_api_routines *api)
{
	(void)err;
	(void)api;
	catalog_db = db;
	return SQLITE_OK;
}

#endif
