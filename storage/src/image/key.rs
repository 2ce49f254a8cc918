//! The key that a person keeps, from which every image's own key is made.

use std::fmt;

use zeroize::Zeroizing;

/// Length of a key in bytes.
pub const KEY_BYTES: usize = 32;

/// A key of 256 bits. It is never shown, and wiped from memory when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct ImageKey(Zeroizing<[u8; KEY_BYTES]>);

impl ImageKey {
    /// Reads what a key file holds: 32 random bytes as they are, or as 64 hexadecimal digits with or
    /// without an end of line.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if it is neither.
    pub fn from_file_content(content: &[u8]) -> Result<Self, KeyError> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        if content.len() == KEY_BYTES {
            key.copy_from_slice(content);
            return Ok(Self(key));
        }
        let digits = content.trim_ascii_end();
        if digits.len() != 2 * KEY_BYTES {
            return Err(KeyError { found: content.len() });
        }
        for (byte, pair) in key.iter_mut().zip(digits.as_chunks::<2>().0) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            let (high, low) = digit(pair[0])
                .zip(digit(pair[1]))
                .ok_or(KeyError { found: content.len() })?;
            *byte = (high << 4 | low) as u8;
        }
        Ok(Self(key))
    }

    /// The key as 64 hexadecimal digits, to be handed to another process of the same user.
    pub fn to_hex(&self) -> Zeroizing<String> {
        let mut digits = Zeroizing::new(String::with_capacity(2 * KEY_BYTES));
        for byte in self.0.iter() {
            for digit in [byte >> 4, byte & 15] {
                digits.extend(char::from_digit(digit.into(), 16));
            }
        }
        digits
    }

    pub(super) fn bytes(&self) -> &[u8; KEY_BYTES] {
        &self.0
    }
}

impl fmt::Debug for ImageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ImageKey(..)")
    }
}

/// Why something is not a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key is 32 random bytes, or 64 hexadecimal digits; found {found} bytes that are neither")]
pub struct KeyError {
    /// How many bytes there were.
    pub found: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_digits_tell_the_same_key_and_anything_else_is_refused() {
        let bytes: Vec<u8> = (0..32).map(|byte| byte * 7 + 3).collect();
        let key = ImageKey::from_file_content(&bytes).unwrap();
        let digits = key.to_hex().to_string();
        assert_eq!(digits.len(), 64);
        for content in [
            digits.clone(),
            digits.clone() + "\n",
            digits.to_uppercase() + "\r\n",
        ] {
            assert_eq!(ImageKey::from_file_content(content.as_bytes()), Ok(key.clone()));
        }
        for bad in [&b""[..], &bytes[1..], &[b'g'; 64], &digits.as_bytes()[1..]] {
            assert_eq!(
                ImageKey::from_file_content(bad),
                Err(KeyError { found: bad.len() })
            );
        }
    }

    #[test]
    fn a_key_is_not_shown() {
        let key = ImageKey::from_file_content(&[b'k'; 32]).unwrap();
        assert_eq!(format!("{key:?}"), "ImageKey(..)");
    }
}
