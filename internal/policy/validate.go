package policy

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	commonv1 "github.com/gpuaas/mesh/gen/gpuaas/common/v1"
	"github.com/gpuaas/mesh/internal/fault"
)

// Ack is an operator's acknowledgement that a change weakens a budget. It counts only with a reason in words, which the
// caller audits.
type Ack struct {
	Weakening bool
	Reason    string
}

func (a Ack) given() bool { return a.Weakening && strings.TrimSpace(a.Reason) != "" }

// parse reads a value of the key as a number: a flag as 0 or 1.
func (k Key) parse(text string) (float64, error) {
	text = strings.TrimSpace(text)
	switch k.Kind {
	case Flag:
		switch text {
		case "true":
			return 1, nil
		case "false":
			return 0, nil
		}
		return 0, fmt.Errorf("%q is not true or false", clip(text))
	case Fraction:
		f, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			return 0, fmt.Errorf("%q is not a number", clip(text))
		}
		return f, nil
	case Seconds, Count:
		n, err := strconv.ParseInt(text, 10, 64)
		if errors.Is(err, strconv.ErrRange) || n < math.MinInt32 || n > math.MaxInt32 {
			return 0, errors.New(clip(text) + " is outside the bounds")
		}
		if err != nil {
			return 0, fmt.Errorf("%q is not a whole number", clip(text))
		}
		return float64(n), nil
	default:
		return 0, fmt.Errorf("kind %d", k.Kind)
	}
}

// check reads a value and refuses one outside the key's bounds.
func (k Key) check(text string) (float64, error) {
	n, err := k.parse(text)
	if err != nil {
		return 0, refused(k, err.Error())
	}
	if k.Kind != Flag && (n < k.min || n > k.max) {
		return 0, refused(k, clip(text)+" is outside the bounds")
	}
	return n, nil
}

func refused(k Key, why string) error {
	want := "true or false"
	if k.Kind != Flag {
		want = k.Min + " to " + k.Max
	}
	return fault.New(commonv1.Reason_REASON_POLICY_VALUE_REFUSED, k.Name+": "+why, fault.Remedy("choose "+want),
		fault.Unmet(k.Name+": "+why))
}

func clip(s string) string { return s[:min(len(s), 40)] }

// weakens reports whether n is weaker than both the value that it replaces and the default: going back towards the
// default is not a weakening.
func (k Key) weakens(n, current float64) bool {
	switch k.Tightens {
	case Lower:
		return n > k.defaulted && n > current
	case Higher:
		return n < k.defaulted && n < current
	case Neither:
	}
	return false
}

// Weakens reports whether the value of the key would be weaker than both the default and the value in this set. It is
// false for a key or a value that Validate refuses for what it is.
func (s Set) Weakens(key, value string) bool {
	k, ok := Lookup(key)
	if !ok {
		return false
	}
	n, err := k.check(value)
	return err == nil && k.weakens(n, s.number(key))
}

// Validate returns nil if the key may be set to the value over the set s. The refusals are faults: policy_key_unknown;
// policy_value_refused, outside the bounds, or a certificate that lives longer than a third of the recovery token's
// age; policy_weakening_unacknowledged, for a budget or a key of severity P0 or P1 whose value is weaker than the
// default and than the current one, unless ack gives a reason.
func (s Set) Validate(key, value string, ack Ack) error {
	k, ok := Lookup(key)
	if !ok {
		return fault.New(commonv1.Reason_REASON_POLICY_KEY_UNKNOWN, fmt.Sprintf("there is no policy key %q", clip(key)))
	}
	n, err := k.check(value)
	if err != nil {
		return err
	}
	next := s.with(key, strings.TrimSpace(value), n)
	if err := next.consistent(); err != nil {
		return err
	}
	if (k.Severity <= P1 || k.Guarded) && k.weakens(n, s.number(key)) && !ack.given() {
		return fault.New(commonv1.Reason_REASON_POLICY_WEAKENING_UNACKNOWLEDGED,
			fmt.Sprintf("%s: %s is weaker than the default %s and weakens a budget of severity %s", k.Name, clip(value),
				k.Default, k.Severity),
			fault.Unmet("the weakening is not acknowledged, or comes without a reason"))
	}
	return nil
}

// consistent refuses values that are within their bounds but wrong in combination.
func (s Set) consistent() error {
	if _, err := s.tooShort(); err != nil {
		return err
	}
	ttl, age := s.number(CertificateTTLSeconds), s.number(RecoveryTokenMaxAgeSeconds)
	if ttl*3 <= age {
		return nil
	}
	return fault.New(commonv1.Reason_REASON_POLICY_VALUE_REFUSED,
		fmt.Sprintf("%s %g is longer than a third of %s %g: a node back from a long outage could never recover by itself",
			CertificateTTLSeconds, ttl, RecoveryTokenMaxAgeSeconds, age),
		fault.Remedy("shorten the certificate, or lengthen the recovery token's age first"),
		fault.Unmet(CertificateTTLSeconds+" * 3 is more than "+RecoveryTokenMaxAgeSeconds))
}
