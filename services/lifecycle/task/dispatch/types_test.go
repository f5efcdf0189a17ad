package dispatch_test

import (
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/names"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheDatabaseKnowsTheTypesAndStatesOfTheProtos compares the domains of a task's type and state with the enums: a
// value that the database does not know fails at the first task of it, and one that the protos do not know is no task
// that a service can read.
func TestTheDatabaseKnowsTheTypesAndStatesOfTheProtos(t *testing.T) {
	testkit.IO(t)
	db := testkit.DB(t)
	for domain, want := range map[string][]string{
		"lifecycle.task_type":  slices.Sorted(slices.Values(names.Spellings[commonv1.TaskType]())),
		"lifecycle.task_state": slices.Sorted(slices.Values(names.Spellings[commonv1.TaskState]())),
	} {
		if len(want) < 10 {
			t.Fatalf("%s: the protos have only %q", domain, want)
		}
		// Every check of the domain bounds it: a later migration may add one.
		rows, err := db.OwnerPool().Query(t.Context(), `SELECT pg_get_constraintdef(oid) FROM pg_constraint
			WHERE contypid = $1::regtype AND contype = 'c' ORDER BY oid`, domain)
		if err != nil {
			t.Fatal(err)
		}
		checks := 0
		for rows.Next() {
			var check string
			if err := rows.Scan(&check); err != nil {
				t.Fatal(err)
			}
			checks++
			var got []string
			for _, quoted := range regexp.MustCompile(`'([^']*)'`).FindAllStringSubmatch(check, -1) {
				got = append(got, quoted[1])
			}
			slices.Sort(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s (-protos +database):\n%s", domain, diff)
			}
		}
		if err := rows.Err(); err != nil || checks == 0 {
			t.Errorf("%s has %d checks, %v", domain, checks, err)
		}
	}
}
