package names

import "google.golang.org/protobuf/reflect/protoreflect"

// OfSet returns the spelling of an enum value; empty for the one that stands for none, which is zero.
func OfSet(e protoreflect.Enum) string {
	if e.Number() == 0 {
		return ""
	}
	return Of(e)
}
