//! Fields of a document that this version does not know.
//!
//! A newer version may have written them. A worker of this version keeps them when it rewrites the document, so both
//! versions can run side by side. Serde buffers the fields of flattened groups and collects the rest here. That costs
//! about a microsecond for an instance document.

use serde::{
    de::{IgnoredAny, MapAccess, Visitor},
    ser::SerializeMap,
    Deserialize, Deserializer, Serialize, Serializer,
};
use serde_json::{Map, Value};
use std::fmt;

/// The unknown fields of a document, for `#[serde(flatten)]`. Cosmos DB's system properties are not among them: their
/// names begin with `_`, and Cosmos DB writes them itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Unknown(Option<Box<Map<String, Value>>>);

impl Serialize for Unknown {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match &self.0 {
            Some(fields) => fields.serialize(serializer),
            None => serializer.serialize_map(Some(0))?.end(),
        }
    }
}

impl<'de> Deserialize<'de> for Unknown {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Unknown;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the fields of a document")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Unknown, A::Error> {
                let mut unknown = Unknown::default();
                while let Some(name) = map.next_key::<String>()? {
                    if name.starts_with('_') {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        unknown.0.get_or_insert_default().insert(name, map.next_value()?);
                    }
                }
                Ok(unknown)
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

#[cfg(test)]
mod tests {
    use crate::model::{ActivityDocument, InstanceDocument, KvDocument, Partition, SessionDocument};
    use serde_json::{json, Value};

    fn from_the_service(document: impl serde::Serialize) -> Value {
        let mut document = serde_json::to_value(document).unwrap();
        for property in ["_etag", "_rid", "_self", "_attachments"] {
            document[property] = json!("x");
        }
        document["_ts"] = json!(7);
        document
    }

    #[test]
    fn unknown_fields_come_back_and_system_properties_do_not() {
        let written = InstanceDocument::new(Partition::instance("i").unwrap(), "token", 7);
        let mut stored = from_the_service(&written);
        stored["newer"] = json!({ "list": [1, 2.5, null, "x"] });
        let read: InstanceDocument = serde_json::from_value(stored).unwrap();
        let mut expected = serde_json::to_value(&written).unwrap();
        expected["newer"] = json!({ "list": [1, 2.5, null, "x"] });
        assert_eq!(serde_json::to_value(&read).unwrap(), expected);
    }

    #[test]
    fn a_document_of_this_version_has_no_unknown_fields() {
        let stored = from_the_service(SessionDocument::new("s", "owner", 7, 8)).to_string();
        let read: SessionDocument = serde_json::from_str(&stored).unwrap();
        assert_eq!(read.unknown, Default::default());
        assert!(read.etag.is_some(), "a known field is read as usual");
    }

    #[test]
    fn a_value_that_is_written_again_keeps_its_unknown_fields() {
        let partition = Partition::instance("i").unwrap();
        let mut stored = serde_json::to_value(KvDocument::written(&partition, "k", None, None, 7, 1)).unwrap();
        stored["newer"] = json!(true);
        let before: KvDocument = serde_json::from_value(stored).unwrap();
        let after = KvDocument::written(&partition, "k", Some(&before), Some("v".to_owned()), 8, 1);
        assert_eq!(serde_json::to_value(&after).unwrap()["newer"], json!(true));
    }

    #[test]
    fn a_required_field_that_is_missing_is_still_an_error() {
        let error = serde_json::from_str::<ActivityDocument>("{\"id\":\"w:1:2\",\"newer\":1}").unwrap_err();
        assert!(error.to_string().contains("missing field"), "{error}");
    }
}
