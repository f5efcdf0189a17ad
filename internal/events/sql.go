package events

import "github.com/gpuaas/mesh/internal/pg"

var (
	// writers append events, and have cursors of their own in the schema of their name.
	writers = []string{pg.RoleNodeAPI, pg.RoleLifecycle, pg.RoleRecovery, pg.RoleReadmodel}
	// readers read the log.
	readers = append([]string{pg.RoleSequencer}, writers...)
)

// commitAsync does not wait for the disk at the commit of a transaction.
var commitAsync = pg.DefineShared(writers, "events.commit_async", `SET LOCAL synchronous_commit = off`)
