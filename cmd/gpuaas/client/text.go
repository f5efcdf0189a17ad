package client

import (
	"fmt"
	"strconv"
	"time"

	"github.com/gpuaas/mesh/internal/names"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
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

// roughly returns a duration as text in at most its two largest units.
func roughly(d time.Duration) string {
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

func spelledMoment(at *timestamppb.Timestamp) string {
	if at == nil {
		return "none"
	}
	return at.AsTime().UTC().Format(time.RFC3339)
}
