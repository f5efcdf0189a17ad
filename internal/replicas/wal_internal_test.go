package replicas

import (
	"testing"

	"github.com/gpuaas/mesh/internal/ids"
	"github.com/gpuaas/mesh/internal/pg"
	"github.com/gpuaas/mesh/internal/testkit"
)

// A beat of a replica that has a row is one record of the write-ahead log beside its commit.
func TestABeatIsOneRecord(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	beat := Beat{ReplicaID: ids.New(), Address: "here:1"}
	pool := db.Pool(pg.RoleNodeAPI)
	if _, err := Write(t.Context(), pool, beat); err != nil {
		t.Fatal(err)
	}
	if n := testkit.Records(t, pool, write.SQL(), beat.ReplicaID, beat.Address, 0, 0, false, true); n != 1 {
		t.Errorf("a beat wrote %d records, want 1", n)
	}
}
