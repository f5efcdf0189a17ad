package obs_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/obs"
)

const (
	isOK   = commonv1.PartState_PART_STATE_OK
	isDown = commonv1.PartState_PART_STATE_DOWN
	isOff  = commonv1.PartState_PART_STATE_OFF
)

func TestPartsSaySinceWhenAndWhatToDo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var store atomic.Pointer[fault.Error]
		h := obs.NewHealth()
		h.Watch("store", func(context.Context) error {
			if f := store.Load(); f != nil {
				return f
			}
			return nil
		})
		h.Watch("spare", func(context.Context) error { return obs.ErrOff })
		// down: it samples often
		h.Ready("database", func(context.Context) error { return errors.New("dial tcp 10.0.0.1:5432: password=secret") })
		if got := h.Parts(); len(got) != 0 {
			t.Fatalf("before the first look: %v", got)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- h.Run(ctx) }()
		begin := time.Now()
		at := func(after time.Duration, state commonv1.PartState, since time.Duration, next string) {
			t.Helper()
			time.Sleep(time.Until(begin.Add(after)))
			synctest.Wait()
			p := h.Parts()[1]
			if p.GetName() != "store" || p.GetState() != state || p.GetSince().AsTime() != begin.Add(since).UTC() ||
				p.GetNextAction() != next || p.GetRequired() {
				t.Errorf("after %s: %v, want %s since %s", after, p, state, since)
			}
			if p.GetObservedAt().AsTime().Before(begin.Add(after - 2*time.Second)) {
				t.Errorf("after %s it was last looked at %s", after, p.GetObservedAt().AsTime())
			}
		}
		at(5*time.Second, isOK, 0, "")
		store.Store(fault.New(commonv1.Reason_REASON_UNAVAILABLE, "it is gone", fault.Remedy("start it")))
		at(7*time.Second, isDown, 5200*time.Millisecond, "start it")
		at(11*time.Second, isDown, 5200*time.Millisecond, "start it")
		if r := h.ReadyReport(t.Context()); len(r.Watched) != 2 || r.Watched[0].Status != "down" ||
			r.Watched[0].Reason != "unavailable" {
			t.Errorf("/readyz says %+v", r)
		}
		store.Store(nil)
		at(13*time.Second, isOK, 11200*time.Millisecond, "")
		parts := h.Parts()
		if p := parts[0]; p.GetName() != "database" || p.GetState() != isDown || !p.GetRequired() ||
			p.GetNextAction() == "" || strings.Contains(p.String(), "secret") {
			t.Errorf("database: %v", p)
		}
		if p := parts[2]; p.GetState() != isOff || p.GetReason() != 0 {
			t.Errorf("spare: %v", p)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestAWatchedPartDoesNotMakeAProcessLessReady: the failure of a part that a service can do without must not take it
// out of a load balancer.
func TestAWatchedPartDoesNotMakeAProcessLessReady(t *testing.T) {
	h := obs.NewHealth()
	h.Watch("store", func(context.Context) error { return errors.New("gone") })
	h.Sample(t.Context())
	w := httptest.NewRecorder()
	h.ReadyHandler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/readyz", nil))
	var r obs.Report
	if err := json.Unmarshal(w.Body.Bytes(), &r); err != nil || w.Code != 200 || !r.OK() || len(r.Watched) != 1 ||
		r.Watched[0].Status != "down" {
		t.Errorf("%d %+v, %v", w.Code, r, err)
	}
}

// A process that has just started is sampled again sooner than after the regular two seconds, so that it does not stay
// reported as down for that long; one that has everything it needs is not sampled more often.
func TestWhatIsNeededIsCheckedSoonWhileItIsDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var loaded atomic.Bool
		var checks atomic.Int64
		h := obs.NewHealth()
		h.Ready("authority", func(context.Context) error {
			checks.Add(1)
			if !loaded.Load() {
				return fault.New(commonv1.Reason_REASON_UNAVAILABLE, "not read yet")
			}
			return nil
		})
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- h.Run(ctx) }()
		time.Sleep(50 * time.Millisecond)
		if got := h.Parts(); len(got) != 1 || got[0].GetState() != isDown {
			t.Fatalf("at the start: %v", got)
		}
		loaded.Store(true)
		time.Sleep(300 * time.Millisecond)
		synctest.Wait()
		if got := h.Parts(); got[0].GetState() != isOK || checks.Load() != 2 {
			t.Errorf("a third of a second later, after %d looks: %v", checks.Load(), got)
		}
		time.Sleep(10 * time.Second)
		if n := checks.Load(); n != 7 {
			t.Errorf("%d looks in ten seconds more", n-2)
		}
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}
