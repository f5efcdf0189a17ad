package policy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"sigs.k8s.io/yaml"
)

// Reader returns the policy in force.
type Reader interface {
	Current() Set
}

// Fixed is a Reader whose policy never changes.
type Fixed struct{ Set Set }

// Current returns the set.
func (f Fixed) Current() Set { return f.Set }

// LoadFunc reads the stored values by key. Package policystore has the one that reads the database.
type LoadFunc func(ctx context.Context) (map[string]string, error)

// SourceConfig is how a Source reads. Zero values mean every 2 s, at most 1 s a read.
type SourceConfig struct {
	Interval time.Duration
	Timeout  time.Duration
	// Hints signals changes that may concern the policy; with it, the stored values are read within Interval after a hint.
	// Nil: they are read every Interval.
	Hints Hints
}

// Hints signals changes. events.Signal implements it.
type Hints interface {
	// C is closed at the next hint.
	C() <-chan struct{}
	// Pace sleeps until a hint, or for as long as none may be missing; for the short time at least.
	Pace(ctx context.Context, now, wake <-chan struct{}, short time.Duration) bool
}

// Source is a Reader that follows the stored values. Until the first read succeeds it returns the defaults, afterwards
// the last good set.
type Source struct {
	load    LoadFunc
	logger  *slog.Logger
	config  SourceConfig
	current atomic.Pointer[snapshot]
	warned  string // the last warning, so that one bad row is not logged every two seconds; used by the loop alone
}

type snapshot struct {
	set     Set
	changed chan struct{} // closed when another snapshot follows
}

// NewSource returns a source that has read nothing yet.
func NewSource(load LoadFunc, logger *slog.Logger, config SourceConfig) *Source {
	if config.Interval <= 0 {
		config.Interval = 2 * time.Second
	}
	if config.Timeout <= 0 {
		config.Timeout = time.Second
	}
	if config.Hints == nil {
		config.Hints = noHints{}
	}
	s := &Source{load: load, logger: logger, config: config}
	s.current.Store(&snapshot{changed: make(chan struct{})})
	return s
}

// Current returns the policy in force. It is cheap enough for a hot path.
func (s *Source) Current() Set { return s.current.Load().set }

// Changed returns the policy in force and a channel that is closed when it is replaced by a different one.
func (s *Source) Changed() (Set, <-chan struct{}) {
	snap := s.current.Load()
	return snap.set, snap.changed
}

// Run reads until ctx ends, and returns nil. A read that fails is logged and keeps the last good set.
func (s *Source) Run(ctx context.Context) error {
	for {
		wake := s.config.Hints.C()
		err := s.runOnce(ctx)
		s.complain(ctx, err)
		hints := s.config.Hints
		if err != nil && !errors.Is(err, errIgnored) { // no hint is repeated for a change that was not read
			hints = noHints{}
		}
		if !hints.Pace(ctx, nil, wake, s.config.Interval) {
			return nil
		}
	}
}

var errIgnored = errors.New("stored policy has values that are ignored")

// noHints is a Hints without hints.
type noHints struct{}

// C implements Hints.
func (noHints) C() <-chan struct{} { return nil }

// Pace implements Hints.
func (noHints) Pace(ctx context.Context, _, _ <-chan struct{}, short time.Duration) bool {
	timer := time.NewTimer(short)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// Refresh reads once. It is called before Run, at start, or by a test; not at the same time as Run.
func (s *Source) Refresh(ctx context.Context) error { return s.runOnce(ctx) }

func (s *Source) runOnce(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.config.Timeout)
	defer cancel()
	values, err := s.load(ctx)
	if err != nil {
		return fmt.Errorf("load policy: %w", err)
	}
	set, err := NewSet(values)
	old := s.current.Load()
	if !set.Equal(old.set) || !maps.Equal(set.text, old.set.text) {
		s.current.Store(&snapshot{set: set, changed: make(chan struct{})})
		close(old.changed)
	}
	if err != nil {
		return fmt.Errorf("%w: %w", errIgnored, err)
	}
	return nil
}

func (s *Source) complain(ctx context.Context, err error) {
	if err == nil {
		s.warned = ""
		return
	}
	if ctx.Err() != nil || s.warned == err.Error() {
		return
	}
	s.warned = err.Error()
	s.logger.WarnContext(ctx, "policy not read cleanly", slog.String("error", err.Error()))
}

// fileAck is the entry of a policy file that acknowledges its weakenings; its value is the reason.
const fileAck = "acknowledge_weakening"

// LoadFile reads a YAML file of keys and values, nested or with dotted names, and returns the values as they are
// stored. Every value is checked against the bounds and the refusals of Validate over the defaults; the entry
// `acknowledge_weakening: REASON` acknowledges the weaker values. The error is the first refusal.
func LoadFile(path string) (map[string]string, error) {
	raw, err := os.ReadFile(path) // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	return ParseFile(raw)
}

// ParseFile does the same as LoadFile on the file's text.
func ParseFile(raw []byte) (map[string]string, error) {
	var tree map[string]any
	if err := yaml.UnmarshalStrict(raw, &tree); err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	flat := map[string]string{}
	if err := flatten("", tree, flat); err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	ack := Ack{Reason: flat[fileAck], Weakening: flat[fileAck] != ""}
	delete(flat, fileAck)
	set, err := NewSet(flat)
	if err != nil {
		return nil, fmt.Errorf("read policy file: %w", err)
	}
	for key, value := range flat {
		// Over the whole file, so that a short certificate and a short token may stand together; the key itself is compared
		// with its default.
		if err := set.without(key).Validate(key, value, ack); err != nil {
			return nil, fmt.Errorf("read policy file: %w", err)
		}
	}
	return flat, nil
}

func flatten(prefix string, tree map[string]any, out map[string]string) error {
	for name, value := range tree {
		key := prefix + name
		switch v := value.(type) {
		case map[string]any:
			if err := flatten(key+".", v, out); err != nil {
				return err
			}
			continue
		case string:
			out[key] = strings.TrimSpace(v)
		case bool:
			out[key] = strconv.FormatBool(v)
		case float64:
			out[key] = strconv.FormatFloat(v, 'f', -1, 64)
		default:
			return fmt.Errorf("%s: want a number, true, false or text", key)
		}
	}
	return nil
}
