package aside_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/aside"
	"github.com/gpuaas/mesh/internal/names"
)

func read(s string) (commonv1.TaskState, error) { return names.Parse[commonv1.TaskState](s) }

func itself(s string) string { return s }

// One of three rows has a state that this build does not know: the others are returned, and the row is reported once
// however often it is read.
func TestRowsSetsAsideAlone(t *testing.T) {
	var log bytes.Buffer
	aside.Log(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { aside.Log(nil) })
	restore := names.Without(commonv1.TaskState_TASK_STATE_DELIVERED)
	defer restore()
	for range 3 {
		got, err := aside.Rows(context.Background(), "test", []string{"queued", "delivered", "running"}, itself, read)
		want := []commonv1.TaskState{commonv1.TaskState_TASK_STATE_QUEUED, commonv1.TaskState_TASK_STATE_RUNNING}
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("%v, %v", got, err)
		}
	}
	if n := strings.Count(log.String(), "set aside"); n != 1 {
		t.Errorf("reported %d times: %s", n, log.String())
	}
	restore()
	if got, err := aside.Rows(context.Background(), "test", []string{"delivered"}, itself, read); err != nil ||
		len(got) != 1 {
		t.Errorf("with the value back: %v, %v", got, err)
	}
}

// An error of another kind is not taken for a row of a newer build.
func TestRowsEndsAtAnyOtherError(t *testing.T) {
	broken := errors.New("broken")
	_, err := aside.Rows(context.Background(), "test", []string{"queued"}, itself,
		func(string) (int, error) { return 0, broken })
	if !errors.Is(err, broken) {
		t.Fatalf("%v", err)
	}
}

// A message shows a row without the value that this build does not know, and the row is reported once. An empty
// spelling is no value at all.
func TestValueIsUnspecified(t *testing.T) {
	var log bytes.Buffer
	aside.Log(slog.New(slog.NewTextHandler(&log, nil)))
	t.Cleanup(func() { aside.Log(nil) })
	for range 2 {
		for text, want := range map[string]commonv1.TaskState{
			"": 0, "queued": commonv1.TaskState_TASK_STATE_QUEUED, "newer": 0,
		} {
			if got := aside.Value[commonv1.TaskState]("value", "row 1", text); got != want {
				t.Errorf("%q: %v", text, got)
			}
		}
	}
	if n := strings.Count(log.String(), "set aside"); n != 1 {
		t.Errorf("reported %d times: %s", n, log.String())
	}
}
