package human

import (
	"fmt"
	"strconv"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/mesh/internal/names"
)

// Enum returns the name of an enum value for people; empty if it is unspecified.
func Enum(e protoreflect.Enum) string {
	if e.Number() == 0 {
		return ""
	}
	return names.Of(e)
}

// YesNo returns yes or no.
func YesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// OnlyIf returns text if b is true, else the empty string.
func OnlyIf(b bool, text string) string {
	if b {
		return text
	}
	return ""
}

// Number returns a whole number as text.
func Number[N int32 | int64](n N) string { return strconv.FormatInt(int64(n), 10) }

// Counted returns a number with the name of what it counts, with a plural s unless the number is 1.
func Counted[N int | int32 | int64 | uint64](n N, thing string) string {
	if n != 1 {
		thing += "s"
	}
	return fmt.Sprintf("%d %s", n, thing)
}

// Seconds returns a duration in seconds as text for people.
func Seconds(s float64) string {
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

// Roughly returns a duration as text in at most its two largest units.
func Roughly(d time.Duration) string {
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", int(d.Seconds()))
	case d < time.Hour:
		return fmt.Sprintf("%dm", int(d.Minutes()))
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%dm", int(d.Hours()), int(d.Minutes())%60)
	}
	return fmt.Sprintf("%dd", int(d.Hours()/24))
}

// Moment returns a time as text for people.
func Moment(at *timestamppb.Timestamp) string {
	if at == nil {
		return "none"
	}
	return at.AsTime().UTC().Format(time.RFC3339)
}
