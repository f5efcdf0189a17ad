package slim

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// LeftOut returns the fields of a message that slim bodies may leave out, by number, each with the column that replaces
// it.
func LeftOut(d protoreflect.MessageDescriptor) []string {
	var out []string
	add := func(of string, p *plan) {
		for _, f := range p.fields {
			out = append(out, fmt.Sprintf("%s%d=%s", of, f.number, columnFields[f.index][0]))
		}
	}
	p := planOf(d)
	add("", p)
	for _, l := range p.lists {
		add(fmt.Sprintf("%d.", l.number), l.plan)
	}
	return out
}
