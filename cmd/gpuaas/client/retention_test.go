package client_test

import (
	"strings"
	"testing"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
)

func TestRetentionStatus(t *testing.T) {
	f := mesh(t)
	always(f, "GetRetention", &readmodelv1.GetRetentionResponse{
		Cuts: []*readmodelv1.RetentionCut{
			{
				Service: "lifecycle", Cut: "tasks", PolicyKey: "retention.tasks_seconds", TermSeconds: 1209600, Rows: 4711,
				LastRows: 3, BeganAt: at(1), DoneAt: at(2), OldestAt: at(1), LagSeconds: 61,
			},
			{
				Service: "recovery", Cut: "serials", TermSeconds: 90, BeganAt: at(1), LagSeconds: 700,
				Failure: "the database does not answer",
			},
		},
		EventsBytes: 5 << 20, DatabaseBytes: 64 << 20, OldestParkedAt: at(1), LagSeconds: 700,
		Held: "no live replica runs lifecycle/gone", NextAction: "start the service again",
	})
	got := call(t, "retention", "status").wants(t, 0)
	for _, want := range []string{
		"lifecycle", "tasks", "14 d", "4711", "1m30s", "does not answer", "5.0 MiB of 64.0 MiB",
		"OLDEST PARKED", "11m40s", "runs lifecycle/gone", "NEXT ACTION",
	} {
		if !strings.Contains(got.out, want) {
			t.Errorf("%q is missing in\n%s", want, got.out)
		}
	}
	if wide := call(t, "retention", "status", "-o", "wide").wants(t, 0); !strings.Contains(wide.out,
		"retention.tasks_seconds") {
		t.Errorf("no policy key in\n%s", wide.out)
	}
	if got := call(t, "retention", "status", "-o", "json").wants(t, 0); !strings.Contains(got.out, `"lag_seconds"`) ||
		!strings.Contains(got.out, `"term_seconds"`) {
		t.Errorf("JSON:\n%s", got.out)
	}
}
