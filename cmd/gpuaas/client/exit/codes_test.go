package exit

import (
	"errors"
	"fmt"
	"testing"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// TestExitOfEveryReason: every reason of the catalogue has a fitting exit code, also if its error is wrapped.
func TestExitOfEveryReason(t *testing.T) {
	for _, reason := range names.All[commonv1.Reason]() {
		err := fmt.Errorf("outer: %w", fault.New(reason, ""))
		if code := CodeOf(err); code < CodeError || code > CodeRefused {
			t.Errorf("%s exits %d", names.Of(reason), code)
		}
		if f := describe(err); f.Message == "" || f.Action == "" || f.Remedy == "" || f.Reason != names.Of(reason) {
			t.Errorf("%s is described as %+v", names.Of(reason), f)
		}
	}
	for err, want := range map[error]int{
		nil: CodeOK, errors.New("x"): CodeError, Usage(errors.New("x")): CodeUsage,
		&Error{Code: CodeTimeout}: CodeTimeout,
		&TracedError{Cause: fmt.Errorf("a: %w", Usage(errors.New("x")))}: CodeUsage,
	} {
		if got := CodeOf(err); got != want {
			t.Errorf("%v exits %d, want %d", err, got, want)
		}
	}
}
