package output

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"runtime/metrics"
	"strconv"
	"time"

	"github.com/itchyny/gojq"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/exit"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
)

const (
	// filterMemory is how many bytes of memory an expression of --jq may take, in addition to a multiple of the data that
	// it filters.
	filterMemory = 512 << 20
	// filterShare is that multiple: data takes several times its size once it is decoded.
	filterShare = 32
	// filterPace is how often the memory is measured.
	filterPace = 50 * time.Millisecond
	// filterGrace is how long an expression that was cancelled may take to return. One that writes to a full pipe never
	// returns.
	filterGrace = time.Second
)

// Filter is an expression of --jq, ready to run.
type Filter struct {
	code   *gojq.Code
	memory uint64 // bytes that it may take
}

// NewFilter compiles an expression, so that an invalid one is refused before a request is sent.
func NewFilter(expression string) (*Filter, error) {
	query, err := gojq.Parse(expression)
	if err != nil {
		return nil, fmt.Errorf("%q is no jq expression: %w", expression, err)
	}
	code, err := gojq.Compile(query, gojq.WithEnvironLoader(os.Environ))
	if err != nil {
		return nil, fmt.Errorf("%q cannot be run: %w", expression, err)
	}
	return &Filter{code: code, memory: filterMemory}, nil
}

// run applies the expression to raw and writes the results to out, one value a line. It returns the cause of ctx once
// ctx has ended, and a usage error for an expression that fails or takes more memory than it may.
func (f *Filter) run(ctx context.Context, raw []byte, out io.Writer, indent string) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	most := liveHeap() + f.memory + filterShare*uint64(len(raw))
	ended := make(chan error, 1)
	go func() { ended <- f.evaluate(ctx, raw, out, indent) }()
	measure := time.NewTicker(filterPace)
	defer measure.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-ctx.Done():
			select {
			case err := <-ended:
				return err
			case <-time.After(filterGrace):
				return context.Cause(ctx)
			}
		case <-measure.C:
			if liveHeap() > most {
				cancel(exit.Usage(fmt.Errorf("--jq: the expression takes more than %s of memory: it may have no end",
					human.Bytes(int64(f.memory)))))
			}
		}
	}
}

// evaluate runs the expression to its end, or to the end of ctx.
func (f *Filter) evaluate(ctx context.Context, raw []byte, out io.Writer, indent string) error {
	var input any
	if err := json.Unmarshal(raw, &input); err != nil {
		return fmt.Errorf("read answer for --jq: %w", err)
	}
	values := f.code.RunWithContext(ctx, input)
	for {
		value, more := values.Next()
		if !more {
			return nil
		}
		if err, failed := value.(error); failed {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			if halted, ok := errors.AsType[*gojq.HaltError](err); ok && halted.Value() == nil {
				return nil
			}
			return exit.Usage(fmt.Errorf("--jq: %w", err))
		}
		text, err := filtered(value, indent)
		if err != nil {
			return exit.Usage(fmt.Errorf("--jq: %w", err))
		}
		if _, err := io.WriteString(out, text+"\n"); err != nil {
			return fmt.Errorf("print: %w", err)
		}
	}
}

// filtered returns the text of a value that an expression returned: a string as it is, nothing for null, a fraction
// with two decimals, anything else as JSON.
func filtered(value any, indent string) (string, error) {
	switch v := value.(type) {
	case string:
		return v, nil
	case nil:
		return "", nil
	case float64:
		if math.Trunc(v) == v {
			return strconv.FormatFloat(v, 'f', 0, 64), nil
		}
		return strconv.FormatFloat(v, 'f', 2, 64), nil
	}
	raw, err := json.MarshalIndent(value, "", indent)
	if indent == "" {
		raw, err = json.Marshal(value)
	}
	return string(raw), err
}

// liveHeap returns how many bytes the last garbage collection found in use.
func liveHeap() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
