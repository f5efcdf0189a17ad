package client

import (
	"context"
	"fmt"
	"strings"

	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// printChanges prints the changes of a watch until the person ends it.
func (s *session) printChanges(ctx context.Context, req *readmodelv1.WatchRequest,
	row func(*readmodelv1.WatchItem) (string, []string),
) error {
	err := s.follow(ctx, req, nil, func(item *readmodelv1.WatchItem) (bool, error) {
		if s.structured() {
			raw, err := names.MarshalJSON(item)
			if err != nil {
				return false, fmt.Errorf("print change: %w", err)
			}
			if s.format == formatYAML {
				if err := s.line("---"); err != nil {
					return false, err
				}
				return false, s.document(raw)
			}
			// Each change is printed as one line, because programs read the stream line by line.
			lines := *s.printer
			lines.format = formatJSONL
			return false, lines.document(raw)
		}
		name, fields := row(item)
		if s.format == formatName {
			return false, s.line(clean(name))
		}
		fields = append([]string{s.now().UTC().Format("15:04:05.000"), enumText(item.GetChange()), name}, fields...)
		for i, field := range fields {
			fields[i] = clean(field)
			if s.tty {
				fields[i] = s.paint(fields[i])
			}
		}
		separator := "\t"
		if s.tty {
			separator = "  "
		}
		return false, s.line(strings.TrimRight(strings.Join(fields, separator), "\t "))
	})
	return err
}
