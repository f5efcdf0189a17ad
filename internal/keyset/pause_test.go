package keyset

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuaas/mesh/internal/events"
)

// A report comes every 15 s, though polls are 2 s apart and a notification brings a round just before one is due.
func TestReportsComeInTime(t *testing.T) {
	for _, listening := range []bool{false, true} {
		t.Run(fmt.Sprintf("listening %t", listening), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				changed := &events.Signal{}
				s := &Set{deps: Deps{Changed: changed}, listening: func() bool { return listening }, reportedAt: began}
				woken := time.AfterFunc(13*time.Second, changed.Notify)
				defer woken.Stop()
				var reports []time.Duration
				for len(reports) < 4 {
					pause := s.pause()
					if s.reportIsDue() { // the round
						s.reportedAt = time.Now()
						reports = append(reports, time.Since(began))
					}
					if !pause(t.Context()) {
						t.Fatal("the pause was ended")
					}
				}
				want := []time.Duration{15 * time.Second, 30 * time.Second, 45 * time.Second, time.Minute}
				if !slices.Equal(reports, want) {
					t.Errorf("reports after %s", reports)
				}
			})
		})
	}
}
