package human

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

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

// ParseBytes reads an amount of storage: `10Gi`, `500M`, or bytes.
func ParseBytes(text string) (int64, error) {
	given, factor := text, 1.0
	text = strings.TrimSuffix(strings.TrimSpace(text), "B")
	for _, u := range units {
		if rest, ok := strings.CutSuffix(text, u.suffix); ok {
			text, factor = rest, u.factor
			break
		}
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil || n < 0 || math.IsNaN(n) || n*factor > math.MaxInt64/2 {
		return 0, fmt.Errorf("%q is no amount of storage, such as 10Gi", given)
	}
	return int64(n * factor), nil
}

// Bytes returns an amount of storage in bytes as text.
func Bytes(n int64) string {
	if n == 0 {
		return "0"
	}
	for i := 4; i >= 0; i-- {
		if f := int64(units[i].factor); n >= f {
			return strconv.FormatFloat(math.Round(float64(n)/float64(f)*10)/10, 'f', -1, 64) + units[i].suffix
		}
	}
	return Number(n)
}
