package config

import "reflect"

// Or returns c with each field that is its zero value replaced by that of defaults, and likewise in the structs among
// its fields. A struct without exported fields, such as a time, is one value.
func Or[T any](c, defaults T) T {
	fill(reflect.ValueOf(&c).Elem(), reflect.ValueOf(defaults))
	return c
}

func fill(c, defaults reflect.Value) {
	if c.Kind() != reflect.Struct || !hasExported(c.Type()) {
		if c.CanSet() && c.IsZero() {
			c.Set(defaults)
		}
		return
	}
	for i := range c.NumField() {
		if c.Type().Field(i).IsExported() {
			fill(c.Field(i), defaults.Field(i))
		}
	}
}

func hasExported(t reflect.Type) bool {
	for i := range t.NumField() {
		if t.Field(i).IsExported() {
			return true
		}
	}
	return false
}
