package process

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

// TestRestartsAreForgotten: an instance that keeps dying is restarted ever more rarely, and what was not restarted for
// a minute is not remembered.
func TestRestartsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &Driver{backoff: map[string]restart{}}
		k := instanceKey{workspaceID: "w", epoch: 1}
		if !d.due(k) || d.due(k) {
			t.Error("a second restart is due at once")
		}
		<-time.After(time.Second)
		if !d.due(k) || d.backoff[instanceID("w", 1)].wait != time.Second {
			t.Errorf("after two restarts: %+v", d.backoff)
		}
		for i := range 100 {
			d.due(instanceKey{workspaceID: fmt.Sprint("gone ", i), epoch: 1})
		}
		<-time.After(2 * time.Minute)
		if !d.due(k) || len(d.backoff) != 1 || d.backoff[instanceID("w", 1)].wait != 500*time.Millisecond {
			t.Errorf("after two minutes without a restart: %d are remembered, %+v", len(d.backoff),
				d.backoff[instanceID("w", 1)])
		}
	})
}
