package audit_test

import (
	"testing"
	"time"

	"github.com/gpuaas/mesh/internal/audit"
	"github.com/gpuaas/mesh/internal/events"
	"github.com/gpuaas/mesh/internal/policy"
	"github.com/gpuaas/mesh/internal/testkit"
)

// TestTheWindowIsThePolicys: the window of a refusal is open 100 seconds after it by default, and has ended where the
// key says that it lasts a minute.
func TestTheWindowIsThePolicys(t *testing.T) {
	for value, left := range map[string]int{"": 1, "60": 0} {
		testkit.IO(t)
		db := testkit.DB(t)
		values := map[string]string{}
		if value != "" {
			values[policy.AuditDedupeWindowSeconds] = value
		}
		set, err := policy.NewSet(values)
		if err != nil {
			t.Fatal(err)
		}
		log := func() *audit.Log {
			t.Helper()
			out, err := audit.New(audit.Deps{
				Logger: testkit.Logger(t), Pool: db.Pool("lifecycle"), Schema: "lifecycle",
				Policy: policy.Fixed{Set: set}, Wake: &events.Signal{},
			})
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		ctx := person(testkit.Context(t))
		entry := audit.Entry{Action: "node.enrol", Outcome: audit.Refused, SubjectType: "node", SubjectID: "n", Reason: "no"}
		if err := log().Repeated(ctx, entry); err != nil {
			t.Fatal(err)
		}
		testkit.SetClockOffset(db, 100*time.Second)
		if err := log().RunOnce(ctx); err != nil {
			t.Fatal(err)
		}
		var n int
		if err := db.Pool("lifecycle").QueryRow(ctx, `SELECT count(*) FROM lifecycle.audit_window`).Scan(&n); err != nil ||
			n != left {
			t.Errorf("with %q: %d windows are left, want %d: %v", value, n, left, err)
		}
	}
}
