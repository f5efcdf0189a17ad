package decoded

import (
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	lifecyclev1 "github.com/gpuaas/mesh/gen/gpuaas/lifecycle/v1"
)

// Scenario: workspaces come and go. Rows that a list showed once are dropped before two generations are full of other
// rows.
func TestUnusedMessagesAreDropped(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var d Messages[*lifecyclev1.Workspace]
		body, err := protojson.Marshal(&lifecyclev1.Workspace{Name: "w"})
		if err != nil {
			t.Fatal(err)
		}
		decode := func(body []byte) (*lifecyclev1.Workspace, error) {
			m := &lifecyclev1.Workspace{}
			return m, protojson.Unmarshal(body, m)
		}
		ask := func(n byte) (kept bool) {
			t.Helper()
			key := Key{ID: [16]byte{n}}
			var to *lifecyclev1.Workspace
			var missing []Missing[*lifecyclev1.Workspace]
			if d.Find(key, &to, &missing) {
				return true
			}
			if err := d.Fill(missing, map[Key][]byte{key: body}, decode); err != nil {
				t.Fatal(err)
			}
			return false
		}
		ask(1)
		for range 200 { // for more than three minutes
			if ask(2); len(d.young)+len(d.old) > 4 {
				t.Fatalf("%d messages are kept of two rows", len(d.young)+len(d.old))
			}
			time.Sleep(time.Second)
		}
		if !ask(2) {
			t.Error("a message that is asked for each second is not kept")
		}
		if ask(1) {
			t.Error("a message that was not asked for in three minutes is kept")
		}
	})
}
