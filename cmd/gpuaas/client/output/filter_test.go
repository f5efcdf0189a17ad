package output

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
)

var errStopped = errors.New("stopped")

// TestFilterThatCollectsIsInterrupted: an expression that prints nothing and only fills memory ends as well.
func TestFilterThatCollectsIsInterrupted(t *testing.T) {
	f, err := NewFilter("[range(1e12)]")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := time.AfterFunc(10*time.Millisecond, func() { cancel(errStopped) })
	defer stop.Stop()
	var out bytes.Buffer
	if err := f.run(ctx, []byte(`{}`), &out, ""); !errors.Is(err, errStopped) || out.Len() > 0 {
		t.Errorf("%v, printed %q", err, out.String())
	}
}

// TestFilterIsBoundInMemory: an expression that collects without end is refused once it takes more than it may.
func TestFilterIsBoundInMemory(t *testing.T) {
	f, err := NewFilter("[range(1e12)]")
	if err != nil {
		t.Fatal(err)
	}
	f.memory = 16 << 20
	var out bytes.Buffer
	err = f.run(t.Context(), []byte(`{}`), &out, "")
	if exit.CodeOf(err) != exit.CodeUsage || !strings.Contains(err.Error(), "more than 16Mi of memory") || out.Len() > 0 {
		t.Errorf("%v, printed %q", err, out.String())
	}
}

// stuck is an output that has no reader.
type stuck struct{ release chan struct{} }

func (s *stuck) Write(p []byte) (int, error) {
	<-s.release
	return len(p), nil
}

// TestInterruptDoesNotWaitForAReader: an expression whose output is not read ends too.
func TestInterruptDoesNotWaitForAReader(t *testing.T) {
	f, err := NewFilter(".")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errStopped)
	out := &stuck{release: make(chan struct{})}
	defer close(out.release)
	if err := f.run(ctx, []byte(`{}`), out, ""); !errors.Is(err, errStopped) {
		t.Error(err)
	}
}

// TestFilteredValues: a string is printed as it is, null as an empty line, a fraction with two decimals, and everything
// else as JSON.
func TestFilteredValues(t *testing.T) {
	for expression, want := range map[string]string{
		`"a\"b"`: "a\"b\n", "null": "\n", "1e3": "1000\n", "1.5": "1.50\n", "true": "true\n", `{a:[1]}`: `{"a":[1]}` + "\n",
		"empty": "", "1,2": "1\n2\n",
		"1, halt, 2": "1\n",
	} {
		f, err := NewFilter(expression)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		if err := f.run(t.Context(), []byte(`{}`), &out, ""); err != nil || out.String() != want {
			t.Errorf("%s: %q, %v", expression, out.String(), err)
		}
	}
}
