/* SPDX-License-Identifier: Apache-2.0 */
/*
 * drive_faults.h - an engine's drive made to fail, and well again, while it runs. For tests with
 * session_fixture.h whose engine was opened with faults (seed=7 or more).
 */
#ifndef DRIVE_FAULTS_H
#define DRIVE_FAULTS_H

#include "engine/engine_impl.h"
#include "engine/io_fault.h"

static void set_now(void *spec)
{
	assert_int_equal(io_fault_set(e->io, spec, NULL, 0), 0);
}

static void faults(const char *spec)
{
	char copy[200];

	snprintf(copy, sizeof(copy), "seed=7,%s", spec);
	loop_call(engine_loop(e), set_now, copy);
}

#endif
