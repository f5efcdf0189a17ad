package kit

import (
	"context"
	"fmt"
	"strings"

	"github.com/gpuaas/mesh/cmd/gpuaas/client/human"
	"github.com/gpuaas/mesh/cmd/gpuaas/client/output"
	readmodelv1 "github.com/gpuaas/mesh/gen/gpuaas/readmodel/v1"
	"github.com/gpuaas/mesh/internal/names"
)

// PrintChanges prints the changes of a watch until the person ends it.
func (s *Session) PrintChanges(ctx context.Context, req *readmodelv1.WatchRequest,
	row func(*readmodelv1.WatchItem) (string, []string),
) error {
	err := s.Follow(ctx, req, nil, func(item *readmodelv1.WatchItem) (bool, error) {
		if s.Structured() {
			raw, err := names.MarshalJSON(item)
			if err != nil {
				return false, fmt.Errorf("print change: %w", err)
			}
			if s.Format == output.FormatYAML {
				if err := s.Line("---"); err != nil {
					return false, err
				}
				return false, s.Document(raw)
			}
			// Each change is printed as one line, because programs read the stream line by line.
			lines := *s.Printer
			lines.Format = output.FormatJSONL
			return false, lines.Document(raw)
		}
		name, fields := row(item)
		if s.Format == output.FormatName {
			return false, s.Line(human.Clean(name))
		}
		fields = append([]string{s.Now().UTC().Format("15:04:05.000"), human.Enum(item.GetChange()), name}, fields...)
		for i, field := range fields {
			fields[i] = human.Clean(field)
			if s.TTY {
				fields[i] = s.Paint(fields[i])
			}
		}
		separator := "\t"
		if s.TTY {
			separator = "  "
		}
		return false, s.Line(strings.TrimRight(strings.Join(fields, separator), "\t "))
	})
	return err
}
