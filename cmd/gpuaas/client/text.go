package client

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuaas/mesh/internal/names"
)

// enumText returns the name of an enum value for people; empty if it is unspecified.
func enumText(e protoreflect.Enum) string {
	if e.Number() == 0 {
		return ""
	}
	return names.Of(e)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// onlyIf returns text if b is true, else the empty string.
func onlyIf(b bool, text string) string {
	if b {
		return text
	}
	return ""
}

func number[N int32 | int64](n N) string { return strconv.FormatInt(int64(n), 10) }

// Counted returns a number with the name of what it counts, with a plural s unless the number is 1.
func Counted[N int | int32 | int64 | uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// parseEnum reads the value of a flag; the empty one is unspecified.
func parseEnum[E protoreflect.Enum](flag, value string) (E, error) {
	var zero E
	if value == "" {
		return zero, nil
	}
	e, err := names.Parse[E](value)
	if err != nil {
		return zero, Usage(fmt.Errorf("--%s: %w", flag, err))
	}
	return e, nil
}

var units = []struct {
	suffix string
	factor float64
}{
	{"Ki", 1 << 10},
	{"Mi", 1 << 20},
	{"Gi", 1 << 30},
	{"Ti", 1 << 40},
	{"Pi", 1 << 50},
	{"k", 1e3},
	{"K", 1e3},
	{"M", 1e6},
	{"G", 1e9},
	{"T", 1e12},
	{"P", 1e15},
}

// parseBytes reads an amount of storage: `10Gi`, `500M`, or bytes.
func parseBytes(text string) (int64, error) {
	text = strings.TrimSuffix(strings.TrimSpace(text), "B")
	factor := 1.0
	for _, u := range units {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			text, factor = rest, u.factor
			break
		}
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n < 0 || math.IsNaN(n) || n*factor > math.MaxInt64/2 {
		return 0, fmt.Errorf("%q is no amount of storage, such as 10Gi", text)
	}
	return int64(n * factor), nil
}

// bytesText returns an amount of storage in bytes as text.
func bytesText(n int64) string {
	if n == 0 {
		return "0"
	}
	for i := 4; i >= 0; i-- {
		if f := int64(units[i].factor); n >= f {
			return strconv.FormatFloat(math.Round(float64(n)/float64(f)*10)/10, 'f', -1, 64) + units[i].suffix
		}
	}
	return number(n)
}

// seconds returns a duration in seconds as text for people.
func seconds(s float64) string {
	switch {
	case s == 0:
		return ""
	case s < 10:
		return strconv.FormatFloat(s, 'f', 2, 64) + "s"
	case s < 120:
		return strconv.FormatFloat(s, 'f', 1, 64) + "s"
	}
	return fmt.Sprintf("%dm%02ds", int(s)/60, int(s)%60)
}
