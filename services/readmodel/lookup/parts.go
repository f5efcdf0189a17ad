package lookup

import (
	"fmt"
	"slices"
	"strings"
)

// digitsBackwards returns the SQL expression for an id's digits in reverse order. The indexes have the same expression.
func digitsBackwards(column string) string {
	return fmt.Sprintf(`(reverse(replace(%s::text, '-', ''))) COLLATE "C"`, column)
}

// digitsOf returns the digits of an id or of a part of one, empty if ref is neither.
func digitsOf(ref string) string {
	digits := strings.ToLower(strings.ReplaceAll(ref, "-", ""))
	if len(digits) < leastDigits || len(digits) > idDigits || strings.Trim(digits, "0123456789abcdef") != "" {
		return ""
	}
	return digits
}

// ID returns ref in the database's format of an id, and whether ref is a whole id.
func ID(ref string) (string, bool) {
	digits := digitsOf(ref)
	if len(digits) != idDigits {
		return "", false
	}
	return uuidText(digits, ""), true
}

// PartOfID returns the SQL condition that the id in column begins or ends with a part of an id. Its arguments, $1 to
// $4, are those of PartArgs. A caller need not read more than Candidates rows.
func PartOfID(column string) string {
	return fmt.Sprintf("(%[1]s BETWEEN $1::uuid AND $2::uuid OR (%[2]s >= $3 AND %[2]s < $4))", column,
		digitsBackwards(column))
}

// PartArgs returns the arguments of the condition of PartOfID, nil if ref is no part of an id.
func PartArgs(ref string) []any {
	digits := digitsOf(ref)
	if digits == "" {
		return nil
	}
	backwards := reversed(digits)
	return []any{uuidText(digits, "0"), uuidText(digits, "f"), backwards, backwards + "g"}
}

// uuidText returns digits, padded with fill to a whole id, in the format of a UUID.
func uuidText(digits, fill string) string {
	digits += strings.Repeat(fill, idDigits-len(digits))
	return digits[:8] + "-" + digits[8:12] + "-" + digits[12:16] + "-" + digits[16:20] + "-" + digits[20:]
}

func reversed(digits string) string {
	out := []byte(digits)
	slices.Reverse(out)
	return string(out)
}
