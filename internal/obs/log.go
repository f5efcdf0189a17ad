package obs

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/lmittmann/tint"

	"github.com/gpuaas/mesh/internal/fault"
	"github.com/gpuaas/mesh/internal/names"
)

// LogConfig sets how a process logs. The zero value is JSON at level info.
type LogConfig struct {
	Level  string `yaml:"level"`  // debug, info, warn, error
	Format string `yaml:"format"` // json, or text for a terminal
	Color  bool   `yaml:"color"`  // text only
}

// Validate returns an error that describes what is wrong with the configuration.
func (c LogConfig) Validate() error {
	if _, err := c.level(); err != nil {
		return err
	}
	switch c.Format {
	case "", "json", "text":
		return nil
	default:
		return fmt.Errorf("log.format %q: want json or text", c.Format)
	}
}

func (c LogConfig) level() (slog.Level, error) {
	var level slog.Level
	if c.Level == "" {
		return slog.LevelInfo, nil
	}
	if err := level.UnmarshalText([]byte(c.Level)); err != nil {
		return level, fmt.Errorf("log.level %q: want debug, info, warn or error", c.Level)
	}
	return level, nil
}

// NewLogger returns a logger that writes to w, adds the correlation of each line's context, and redacts what looks like
// a secret.
func NewLogger(w io.Writer, c LogConfig) (*slog.Logger, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	level, err := c.level()
	if err != nil {
		return nil, err
	}
	if c.Format == "text" {
		return slog.New(Handler(tint.NewTextHandler(w, &tint.Options{
			Level: level, TimeFormat: time.TimeOnly + ".000", NoColor: !c.Color, ReplaceAttr: replace,
		}))), nil
	}
	return slog.New(Handler(slog.NewJSONHandler(w, &slog.HandlerOptions{Level: level, ReplaceAttr: replace}))), nil
}

// Handler wraps a handler so that it adds the correlation of each record's context.
func Handler(next slog.Handler) slog.Handler {
	if _, ok := next.(correlating); ok {
		return next
	}
	return correlating{next: next}
}

// correlating adds ids to records. An id that the logger or the line names itself is not written twice. Within a group
// the ids are written inside the group: slog gives a handler no way to write at the top level again, and our code logs
// without groups.
type correlating struct {
	next  slog.Handler
	own   map[string]bool // keys bound by With at the top level
	group bool
}

func (h correlating) Enabled(ctx context.Context, level slog.Level) bool {
	return h.next.Enabled(ctx, level)
}

func (h correlating) Handle(ctx context.Context, r slog.Record) error {
	c := From(ctx)
	if c == (Correlation{}) {
		return h.next.Handle(ctx, r)
	}
	return h.next.Handle(ctx, withAttrs(r, c.Attrs(), h.own))
}

func withAttrs(r slog.Record, attrs []slog.Attr, own map[string]bool) slog.Record {
	present := map[string]bool{}
	r.Attrs(func(a slog.Attr) bool {
		present[a.Key] = true
		return true
	})
	out := r.Clone()
	for _, a := range attrs {
		if !present[a.Key] && !own[a.Key] {
			out.AddAttrs(a)
		}
	}
	return out
}

func (h correlating) WithAttrs(attrs []slog.Attr) slog.Handler {
	if !h.group {
		own := make(map[string]bool, len(h.own)+len(attrs))
		for k := range h.own {
			own[k] = true
		}
		for _, a := range attrs {
			own[a.Key] = true
		}
		h.own = own
	}
	h.next = h.next.WithAttrs(attrs)
	return h
}

func (h correlating) WithGroup(name string) slog.Handler {
	h.next = h.next.WithGroup(name)
	h.group = h.group || name != ""
	return h
}

// Err returns the attribute for an error's text, cause included. For nil it is empty and not printed.
func Err(err error) slog.Attr {
	if err == nil {
		return slog.Attr{}
	}
	return slog.String(KeyError, err.Error())
}

// Reason returns the attribute for the reason of an error: a fault's own, or the one with which the error would leave
// the process.
func Reason(err error) slog.Attr {
	if err == nil {
		return slog.Attr{}
	}
	return slog.String(KeyReason, names.Of(fault.ReasonOf(err)))
}

// replace redacts attributes whose key is that of a secret, and in texts what looks like a secret.
func replace(_ []string, a slog.Attr) slog.Attr {
	if secretKey(a.Key) {
		return slog.String(a.Key, Redacted)
	}
	if a.Value.Kind() == slog.KindString {
		if s := a.Value.String(); suspicious(s) {
			return slog.String(a.Key, Redact(s))
		}
	}
	if a.Value.Kind() == slog.KindAny {
		if err, ok := a.Value.Any().(error); ok {
			return slog.String(a.Key, Redact(err.Error()))
		}
	}
	return a
}

func secretKey(key string) bool {
	key = strings.ToLower(key)
	switch key {
	case "token", "secret", "password", "passwd", "authorization", "cookie", "private_key", "launch_secret", "bearer",
		"dsn", "database_url":
		return true
	}
	return strings.HasSuffix(key, "_token") || strings.HasSuffix(key, "_secret") || strings.HasSuffix(key, "_password")
}
