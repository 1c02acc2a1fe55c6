//! Document ids that are legal in every place where Cosmos DB uses them.
//!
//! Invariants:
//!
//! - A [`DocumentId`] that this crate makes contains only ASCII letters, digits, `_`, `-`, `~` and `:`.
//! - It is never empty and never longer than [`MAX_BYTES`].
//! - Names that a user chooses go through [`encode`], which is injective: two different names never share an id.

use sha2::{Digest, Sha256};
use std::fmt;

/// Cosmos DB's limit for an item id, in bytes.
pub(crate) const MAX_BYTES: usize = 1_023;

/// The largest encoding of a name. A digest replaces a longer one, so that an id can hold several parts.
const MAX_ENCODED: usize = 240;

/// The id of a document: unique within its partition, legal by construction.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct DocumentId(String);

impl DocumentId {
    /// An id from a kind and its parts. A part is a number, a token or an [`encode`]d name.
    pub(crate) fn new(kind: &'static str, parts: &[&str]) -> Self {
        let mut id = String::from(kind);
        for part in parts {
            id.push(':');
            id.push_str(part);
        }
        debug_assert!(check(&id).is_ok(), "{id} is not a legal id");
        Self(id)
    }

    /// The id of a document that another program may have written. Cosmos DB accepts more ids than this crate makes.
    pub(crate) fn of_any<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        serde::Deserialize::deserialize(deserializer).map(Self)
    }

    /// The id as Cosmos DB sees it.
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for DocumentId {
    type Error = String;

    fn try_from(id: String) -> Result<Self, Self::Error> {
        check(&id)?;
        Ok(Self(id))
    }
}

impl From<DocumentId> for String {
    fn from(id: DocumentId) -> Self {
        id.0
    }
}

impl fmt::Display for DocumentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for DocumentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn check(id: &str) -> Result<(), String> {
    let legal = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'~' | b':');
    if id.is_empty() || id.len() > MAX_BYTES {
        return Err(format!("a document id has 1 to {MAX_BYTES} bytes, not {}", id.len()));
    }
    match id.bytes().position(|b| !legal(b)) {
        Some(at) => Err(format!("byte {at} of the document id is not legal")),
        None => Ok(()),
    }
}

/// Encodes a name of any characters and length as a part of an id.
///
/// - Letters, digits, `_` and `-` stay as they are.
/// - Every other byte becomes `~` and two hex digits.
/// - The empty name becomes a single `~`.
/// - A name with a long encoding becomes `~h` and its SHA-256. `h` is no hex digit, so the forms cannot collide.
pub(crate) fn encode(name: &str) -> String {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    if name.is_empty() {
        return "~".to_owned();
    }
    let mut encoded = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-') {
            encoded.push(byte as char);
        } else {
            encoded.push('~');
            encoded.push(HEX[usize::from(byte >> 4)] as char);
            encoded.push(HEX[usize::from(byte & 15)] as char);
        }
        if encoded.len() > MAX_ENCODED {
            return format!("~h{}", digest(name));
        }
    }
    encoded
}

/// The SHA-256 of a name in hex: short, legal in an id, and different for different names.
pub(crate) fn digest(name: &str) -> String {
    Sha256::digest(name.as_bytes()).iter().fold(String::with_capacity(64), |mut hex, byte| {
        use fmt::Write;
        // Writing to a String can't fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const AWKWARD: &[&str] = &[
        "", "/", "\\", "?", "#", "a/b", "a\\b", "a?b", "a#b", "~", "~2f", "~h", "🦀", ".", "..", " ", "%2F", "a:b",
        "\u{0}", "é", "A", "a",
    ];

    #[test]
    fn awkward_names_make_legal_ids_that_differ() {
        let ids: std::collections::HashSet<_> = AWKWARD.iter().map(|n| DocumentId::new("kv", &[&encode(n)])).collect();
        assert_eq!(ids.len(), AWKWARD.len());
        for id in ids {
            check(id.as_str()).unwrap();
        }
    }

    #[test]
    fn names_of_ten_kilobytes_make_short_ids_that_differ() {
        let long = "/".repeat(10_240);
        let other = format!("{}x", &long[1..]);
        let (a, b) = (encode(&long), encode(&other));
        assert_ne!(a, b);
        assert!(a.len() < 80 && b.len() < 80);
        DocumentId::new("kv", &[&a, &b, &a]);
    }

    #[test]
    fn an_id_that_cosmos_db_refuses_is_refused() {
        for bad in ["", "a/b", "a\\b", "a?b", "a#b", "ü"] {
            assert!(DocumentId::try_from(bad.to_owned()).is_err(), "{bad:?}");
        }
        assert!(DocumentId::try_from("a".repeat(MAX_BYTES)).is_ok());
        assert!(DocumentId::try_from("a".repeat(MAX_BYTES + 1)).is_err());
    }

    proptest! {
        #[test]
        fn any_name_makes_a_legal_id(name in any::<String>()) {
            prop_assert!(check(&encode(&name)).is_ok());
        }

        #[test]
        fn different_names_make_different_ids(a in any::<String>(), b in any::<String>()) {
            prop_assert_eq!(a == b, encode(&a) == encode(&b));
        }

        #[test]
        fn names_that_differ_in_one_place_make_different_ids(a in "[ -~]{0,300}", at in 0usize..300, c in "[ -~]") {
            let mut b: Vec<char> = a.chars().collect();
            if at < b.len() {
                b[at] = c.chars().next().unwrap();
            } else {
                b.push(c.chars().next().unwrap());
            }
            let b: String = b.into_iter().collect();
            prop_assert_eq!(a == b, encode(&a) == encode(&b));
        }
    }
}
